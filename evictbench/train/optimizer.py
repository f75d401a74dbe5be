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
    from evictbench.train.distillation import Pupil

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-4, 1.0
WARM_UP, FLOOR = 0.05, 0.1


def learning_rate(step: int, steps: int, peak: float) -> float:
    """The scorer's rate at a step, from 0: up over the first 5%, then down to a tenth along a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return peak * (step + 1) / warm
    share = (step - warm) / max(1, steps - warm)
    return peak * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * share)) / 2)


def adamw(parameters: Iterable[torch.nn.Parameter], rate: float) -> Optimizer:
    """AdamW as all trainings here use it."""
    return torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY)


class Optimisers:
    """What steps the scorer and, in fine-tuning, the model. pupil, model: the model and its optimiser, as accelerate
    has prepared them; None where the model is frozen. scorer: None where a learner has no parameters."""

    def __init__(self, learner: Learner, accelerator: Accelerator, rate: float, pupil: Any, model: Any) -> None:
        self.parameters = [parameter for parameter in learner.parameters() if parameter.requires_grad]
        self.scorer = adamw(self.parameters, rate) if self.parameters else None
        self.accelerator = accelerator
        self.pupil = pupil
        self.model = model

    def step(self, rate: float) -> dict[str, float]:
        """One step of both, with the scorer's rate; what the log says of it: the rate, and the norms of the gradients
        before they were clipped."""
        said: dict[str, float] = {}
        if self.scorer is not None:
            if self.accelerator.num_processes > 1:
                for parameter in self.parameters:
                    own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = self.accelerator.reduce(own, "mean")
            said |= {"lr": rate, "grad_norm": float(torch.nn.utils.clip_grad_norm_(self.parameters, CLIP))}
        if self.model is not None:
            norm = self.accelerator.clip_grad_norm_(self.pupil.parameters(), CLIP)
            said["model_grad_norm"] = 0.0 if norm is None else float(norm)
        bad = next((name for name, norm in said.items() if not math.isfinite(norm)), None)
        if bad is not None:
            raise RunFailed(f"The gradient is {said[bad]} ({bad}): lower --lr or --model-lr.")
        if self.scorer is not None:
            for group in self.scorer.param_groups:
                group["lr"] = rate
            self.scorer.step()
            self.scorer.zero_grad(set_to_none=True)
        if self.model is not None:
            self.model.step()
            self.model.zero_grad(set_to_none=True)
        return said


def prepare(pupil: Pupil, accelerator: Accelerator, rate: float) -> tuple[Any, Any]:
    """The model that is trained and its optimiser, wrapped as accelerate was told to (nothing, DDP, FSDP)."""
    alone = accelerator.num_processes == 1
    if getattr(accelerator, "is_fsdp2", False):
        both = accelerator.prepare(pupil, adamw(pupil.parameters(), rate))
        return both[0], both[1]
    wrapped = accelerator.prepare_model(pupil, device_placement=not alone)
    return wrapped, accelerator.prepare_optimizer(adamw(wrapped.parameters(), rate), device_placement=False)
