"""The loop that trains learned policies. It is one for all of them; each policy's learner says what is learned.

Without `finetune` the model stays frozen and the scorer alone is trained. A stored learner's features are collected
first (`evictbench.train.features`), and its steps need no model; another learner gets the model with every batch. With
`finetune` the model is trained beside the scorer: the model by its divergence from the frozen one while it sees what
the scorer leaves it (`evictbench.train.distillation`, `evictbench.train.sparse_attention`), the scorer by its own loss
on the features of that pass, and neither by the other's loss.

Both are stepped by AdamW (betas .9 and .95, weight decay 1e-4), gradients clipped to norm 1 each. The scorer's rate
rises over the first 5% of the steps and falls to a tenth along a cosine; the model's is constant. A step draws its
blocks, budgets and noise from the seed and its own number, so that a training that is killed and goes on from its last
checkpoint ends with the same weights. Several processes (accelerate launch) each take their own blocks; the scorer's
gradients are averaged here, the model's by accelerate.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from evictbench.cache import attention
from evictbench.errors import RunFailed, UserError
from evictbench.models import load
from evictbench.policy.learner import Batch, Learner, Losses
from evictbench.train import checkpoint
from evictbench.train.distillation import StudentModel, TeacherModel, check_head
from evictbench.train.features import FeatureStore
from evictbench.train.optimizer import Optimisers, learning_rate, prepare
from evictbench.train.plan import BlockOrder, TrainPlan, derive_seed, draw_budget
from evictbench.train.settings import STORE
from evictbench.train.sparse_attention import StudentAttention

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

STATISTICS_BLOCKS = 32
"""Blocks from which a learner sets the statistics of its inputs."""


class Watcher(Protocol):
    """Shows a training while it goes on; called in the first process only."""

    def phase(self, text: str) -> None:
        """Something begins that takes a while."""

    def planned(self, plan: TrainPlan) -> None:
        """Everything is checked."""

    def collected(self, done: int, total: int) -> None:
        """Features of so many blocks are on the disk."""

    def step(self, line: Mapping[str, Any], steps: int) -> None:
        """A step is done and logged: its line of the log. steps: how many there will be."""


@dataclass
class Trained:
    """The result of the loop.

    held_out: the means of the losses on held-out blocks. calibration: the learner's. tokens: how many were trained on.
    student, state: the fine-tuned model and its tensors; None where it stayed frozen, and in other processes.
    """

    held_out: Mapping[str, float]
    calibration: Mapping[str, Any]
    tokens: int
    student: StudentModel | None = None
    state: Mapping[str, Tensor] | None = None


class Trainer:
    """One training in one process, from its plan to what is saved."""

    def __init__(self, plan: TrainPlan, accelerator: Accelerator, watch: Watcher) -> None:
        self.plan = plan
        self.settings = plan.settings
        self.learner: Learner = plan.learner
        self.accelerator = accelerator
        self.watch = watch
        self.finetune = plan.settings.finetune
        self.device = torch.device("cpu")
        self.student: Any = None
        self.teacher: Any = None
        self.student_optimiser: Any = None
        self.order = BlockOrder(
            seed=plan.settings.seed,
            count=plan.train_blocks,
            rows=plan.settings.batch_size,
            passes=plan.settings.accumulate,
            processes=accelerator.num_processes,
            process=accelerator.process_index,
        )
        self._store = self._make_store() if self.learner.stored else None

    @property
    def from_store(self) -> bool:
        """Whether steps read features from the store, and need no model."""
        return self._store is not None and not self.finetune

    @cached_property
    def model(self) -> PreTrainedModel:
        """The base model, frozen, attending through evictbench; loaded when first needed."""
        self.watch.phase("loading the weights")
        settings, alone = self.settings, self.accelerator.num_processes == 1
        device = settings.device if alone else str(self.accelerator.device)
        model = load.load_model(self.plan.source, device, settings.dtype, settings.trust_remote_code)
        attention.use(model)
        model.requires_grad_(False)
        return model

    @property
    def has_model(self) -> bool:
        """Whether the base model is loaded at the moment."""
        return "model" in self.__dict__

    def run(self) -> Trained:
        """Train, from the last checkpoint if there is one."""
        self._set_up()
        folder, steps = self.settings.out, self.settings.steps
        optimisers = Optimisers(self.learner, self.accelerator, self.settings.lr, self.student, self.student_optimiser)
        saved = (self.learner, optimisers.scorer, self.accelerator, self.finetune)
        finished = checkpoint.restore(folder, *saved)
        if self.accelerator.is_main_process:
            checkpoint.truncate_log(folder, finished)
        for step in range(finished, steps):
            line = self._step(step, optimisers)
            if self.accelerator.is_main_process:
                checkpoint.append_log(folder, line)
                self.watch.step(line, steps)
            if (step + 1) % self.settings.save_every == 0 and step + 1 < steps:
                checkpoint.save(folder, step + 1, *saved)
        return self._finish()

    def batch(self, indices: Sequence[int], step: int, name: str, budget: int) -> Batch:
        """A batch of the blocks `indices`, all of one length. name: tells its noise from that of other batches of the
        step."""
        blocks = [self.plan.blocks[index] for index in indices]
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.settings.seed, "noise", step, name))
        features = self._store.read_batch(blocks) if self._store is not None and self.from_store else None
        tokens = torch.cat(blocks).to(self.device)
        logits: list[Tensor] = []

        def teacher() -> Tensor:
            if not logits:
                with torch.no_grad():
                    logits.append(self.model(input_ids=tokens, use_cache=False).logits)
            return logits[0]

        return Batch(
            tokens=tokens,
            step=step,
            steps=self.settings.steps,
            budget=budget,
            window=self.settings.window,
            generator=generator,
            features=features,
            model=None if self.from_store else self.model,
            teacher=None if self.from_store else teacher,
        )

    def losses(self, batch: Batch) -> Losses:
        """The loss of a batch: the scorer's, and with `finetune` the model's divergence (`kl`) added to it.

        Raises RunFailed for features with gradients, through which the scorer's loss would train the model.
        """
        if not self.finetune:
            return self.learner.loss(batch)
        top = self.teacher(batch.tokens)
        sparse = StudentAttention(self.learner.attention(batch))
        kl: Tensor = self.student(batch.tokens, *top, sparse)
        features = sparse.features()
        parts = {"kl": float(kl.detach())}
        if features is None:
            return Losses(kl, parts)
        if any(tensor.requires_grad for tensor in features.values()):
            raise RunFailed("The learner's features carry gradients into the model: they have to be detached.")
        scorer = self.learner.loss(dataclasses.replace(batch, features=features))
        parts |= {"score": float(scorer.total.detach()), **scorer.parts}
        return Losses(kl + scorer.total.to(kl.device), parts)

    def _set_up(self) -> None:
        """Collect features, place learner and models, and let the learner set its statistics."""
        if self.from_store:
            self._collect()
        if not self.from_store or self._calibrates:
            self.device = self.model.device
        elif self.settings.device not in ("cpu", "mps") and torch.cuda.is_available():
            numbered = ":" in self.settings.device
            self.device = torch.device(self.settings.device) if numbered else self.accelerator.device
        self.learner.to(self.device)
        self._check_learner_alone()
        count = min(STATISTICS_BLOCKS, self.plan.train_blocks)
        blocks = [self.plan.blocks[self.order.block(index)] for index in range(count)]
        if self.from_store:
            assert self._store is not None
            self.learner.measure(self._store.read(block) for block in blocks)
        elif self.learner.stored:
            self.learner.measure(self._features(block) for block in blocks)
        else:
            self.learner.begin(self.model, [block.to(self.model.device) for block in blocks])
        if self.finetune:
            self._set_up_models()

    def _set_up_models(self) -> None:
        """Make the teacher, which is the frozen model, and the student, a copy of it that is trained."""
        check_head(self.model)
        self.watch.phase("loading the weights that are trained")
        alone = self.accelerator.num_processes == 1
        device = self.settings.device if alone else "cpu"
        dtype = "float32" if self.settings.dtype == "auto" else self.settings.dtype
        model = load.load_model(self.plan.source, device, dtype, self.settings.trust_remote_code)
        attention.use(model)
        model.train()
        older: Any = getattr(model, "gradient_checkpointing_enable", None)
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
        self.teacher = TeacherModel(self.model)
        self.student, self.student_optimiser = prepare(StudentModel(model), self.accelerator, self.settings.model_lr)

    def _step(self, step: int, optimisers: Optimisers) -> dict[str, Any]:
        """Do one step; returns its line for the log, with the numbers of this process."""
        began = time.monotonic()
        settings = self.settings
        torch.manual_seed(derive_seed(settings.seed, "global", step, self.accelerator.process_index))
        sums: dict[str, list[float]] = {}
        budgets, tokens = [], 0
        for number, indices in enumerate(self.order.batches(step)):
            name = f"{self.accelerator.process_index}-{number}"
            budgets.append(draw_budget(settings.seed, step, name, self.plan.checked.budgets))
            batch = self.batch(indices, step, name, budgets[-1])
            with self.accelerator.autocast():
                losses = self.losses(batch)
            value = float(losses.total.detach())
            if not math.isfinite(value):
                raise RunFailed(
                    f"The loss is {value} at step {step + 1}: lower --lr or --model-lr; the last checkpoint is in "
                    f"{settings.out}."
                )
            if losses.total.requires_grad:
                self.accelerator.backward(losses.total / settings.accumulate)
            _add(sums, {"loss": value, **losses.parts})
            tokens += batch.tokens.numel() * self.accelerator.num_processes
        logged = optimisers.step(learning_rate(step, settings.steps, settings.lr))
        return {
            "step": step + 1,
            **_means(sums),
            **logged,
            "budget": budgets[0] if len(budgets) == 1 else budgets,
            "tokens": tokens,
            "seconds": round(time.monotonic() - began, 4),
        }

    def _finish(self) -> Trained:
        """Measure the held-out loss, calibrate, and gather the fine-tuned model's tensors."""
        held_out = self._held_out_loss()
        calibration: Mapping[str, Any] = {}
        if self._calibrates:
            self.watch.phase("calibrating")
            blocks = [self.plan.blocks[index].to(self.model.device) for index in self.plan.held_out]
            with torch.no_grad():
                calibration = self.learner.calibrate(self.model, blocks)
        tokens = sum(line["tokens"] for line in checkpoint.read_log(self.settings.out))
        trained = Trained(held_out, calibration, tokens)
        if self.finetune:
            state = self.accelerator.get_state_dict(self.student)
            if self.accelerator.is_main_process:
                trained.student = self.accelerator.unwrap_model(self.student)
                trained.state = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        return trained

    def _held_out_loss(self) -> dict[str, float]:
        """The means of the losses over the held-out blocks, which take the budgets in turn."""
        sums: dict[str, list[float]] = {}
        if self.plan.held_out:
            self.watch.phase("the loss on held-out blocks")
        for number, index in enumerate(self.plan.held_out):
            budget = self.plan.checked.budgets[number % len(self.plan.checked.budgets)]
            with torch.no_grad(), self.accelerator.autocast():
                losses = self.losses(self.batch([index], self.settings.steps - 1, f"held-out-{number}", budget))
            _add(sums, {"loss": float(losses.total), **losses.parts})
        return _means(sums)

    def _collect(self) -> None:
        """Compute the features that the store lacks, each process its share."""
        assert self._store is not None
        wanted = [*self.order.blocks_seen(self.settings.steps, STATISTICS_BLOCKS), *self.plan.held_out]
        mine = wanted[self.accelerator.process_index :: self.accelerator.num_processes]
        missing = self._store.missing(self.plan.blocks, mine)
        if missing:
            self.learner.to(self.model.device)
            self.watch.phase("collecting features")
            for done in self._store.collect(self.plan.blocks, missing, self.model, self.learner):
                self.watch.collected(len(mine) - len(missing) + done, len(mine))
            if not self._calibrates:
                del self.__dict__["model"]  # the cached property: its memory is the scorer's from here on
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        self.accelerator.wait_for_everyone()

    @property
    def _calibrates(self) -> bool:
        """Whether the learner calibrates, for which the model is needed after the last step."""
        return type(self.learner).calibrate is not Learner.calibrate

    def _features(self, tokens: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return self.learner.features(self.model, tokens.to(self.model.device))

    def _make_store(self) -> FeatureStore:
        settings = self.settings
        depends_on = {
            "weights": self.plan.sha256,
            "dtype": self.plan.dtype,
            **self.learner.feature_settings(),
        }
        return FeatureStore(settings.store or settings.out / STORE, depends_on)

    def _check_learner_alone(self) -> None:
        """Raise UserError for a learner that holds the model as a submodule: it would train and save it."""
        from transformers import PreTrainedModel

        if any(isinstance(module, PreTrainedModel) for module in self.learner.modules()):
            raise UserError("The learner holds the model as a part of itself: it is given the model with every batch.")


def _add(sums: dict[str, list[float]], parts: Mapping[str, float]) -> None:
    """Add one pass's numbers; one that is not finite says that there was nothing to measure, and is left out."""
    for part, number in parts.items():
        if math.isfinite(number):
            sums.setdefault(part, []).append(float(number))


def _means(sums: Mapping[str, list[float]]) -> dict[str, float]:
    return {part: sum(numbers) / len(numbers) for part, numbers in sums.items()}
