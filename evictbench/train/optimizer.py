"""The optimisers of a training: the scorer's, whose rate rises and falls, and the model's, whose rate stays."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from evictbench.errors import RunFailed

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer

    from evictbench.policy.learner import Learner
    from evictbench.train.distillation import StudentModel

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-4, 1.0
WARM_UP, FLOOR = 0.05, 0.1


def learning_rate(step: int, steps: int, peak: float) -> float:
    """The scorer's rate at a step, counted from 0: it rises to `peak` over the first 5% of `steps`, then falls to a
    tenth of it along a cosine."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2)


def adamw(parameters: Iterable[torch.nn.Parameter], rate: float) -> Optimizer:
    """AdamW with the betas and weight decay of every training here."""
    return torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY)


class Optimisers:
    """The optimisers of the scorer and, in fine-tuning, of the model.

    rate: the scorer's peak learning rate. student: the model that is trained, and student_optimiser: its optimiser, as
    accelerate has prepared them; None where the model is frozen. scorer: None where a learner has no parameters.
    """

    def __init__(
        self, learner: Learner, accelerator: Accelerator, rate: float, student: Any, student_optimiser: Any
    ) -> None:
        self.parameters = [parameter for parameter in learner.parameters() if parameter.requires_grad]
        self.scorer = adamw(self.parameters, rate) if self.parameters else None
        self.accelerator = accelerator
        self.student = student
        self.student_optimiser = student_optimiser

    def step(self, rate: float) -> dict[str, float]:
        """Do one step of both. rate: the scorer's. Returns the log's numbers: the rate, and the norms of the gradients
        before they were clipped. Raises RunFailed for a norm that is not finite."""
        logged: dict[str, float] = {}
        if self.scorer is not None:
            if self.accelerator.num_processes > 1:
                for parameter in self.parameters:
                    own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = self.accelerator.reduce(own, "mean")
            logged |= {"lr": rate, "grad_norm": float(torch.nn.utils.clip_grad_norm_(self.parameters, CLIP))}
        if self.student_optimiser is not None:
            norm = self.accelerator.clip_grad_norm_(self.student.parameters(), CLIP)
            logged["model_grad_norm"] = 0.0 if norm is None else float(norm)
        bad = next((name for name, norm in logged.items() if not math.isfinite(norm)), None)
        if bad is not None:
            raise RunFailed(f"The gradient is {logged[bad]} ({bad}): lower --lr or --model-lr.")
        if self.scorer is not None:
            for group in self.scorer.param_groups:
                group["lr"] = rate
            self.scorer.step()
            self.scorer.zero_grad(set_to_none=True)
        if self.student_optimiser is not None:
            self.student_optimiser.step()
            self.student_optimiser.zero_grad(set_to_none=True)
        return logged


def prepare(student: StudentModel, accelerator: Accelerator, rate: float) -> tuple[Any, Any]:
    """The model that is trained and its optimiser, wrapped as accelerate is configured (not at all, DDP or FSDP)."""
    alone = accelerator.num_processes == 1
    if getattr(accelerator, "is_fsdp2", False):
        wrapped, optimiser = accelerator.prepare(student, adamw(student.parameters(), rate))
        return wrapped, optimiser
    wrapped = accelerator.prepare_model(student, device_placement=not alone)
    return wrapped, accelerator.prepare_optimizer(adamw(wrapped.parameters(), rate), device_placement=False)
