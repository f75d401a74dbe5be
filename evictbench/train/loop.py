"""The loop that trains learned policies, one for all of them; what is learned, and from what, is their learner's.

Scorer only: the model stays frozen. A stored learner's features are collected first (`evictbench.train.features`) and
trained from without the model; another gets the model with every batch. With `finetune`, the model is trained beside
the scorer: the model by its divergence from the frozen one while it sees what the scorer leaves it
(`evictbench.train.distillation`, `evictbench.train.sparse_attention`), the scorer by its own loss on what that pass
showed, and neither by the other's.

Both go by AdamW (betas .9 and .95, weight decay 1e-4), gradients clipped to norm 1 each; the scorer's rate rises over
the first 5% of the steps and falls to a tenth along a cosine, the model's is constant. A step draws its blocks,
budgets and noise from the seed and its own number, so that a training that is killed and goes on from its last
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
from evictbench.train.distillation import Pupil, Teacher, check_head
from evictbench.train.features import Store, rows
from evictbench.train.optimizer import Optimisers, learning_rate, prepare
from evictbench.train.plan import Order, Plan, drawn, seed_of
from evictbench.train.settings import STORE
from evictbench.train.sparse_attention import Following

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

LOOKED_AT = 32
"""Blocks that a learner sets the statistics of its inputs from."""


class Watcher(Protocol):
    """Whoever shows a training while it goes on; called in the first process only."""

    def phase(self, text: str) -> None:
        """Something begins that takes a while."""

    def planned(self, plan: Plan) -> None:
        """Everything is checked."""

    def collected(self, done: int, total: int) -> None:
        """Features of so many blocks are on the disk."""

    def step(self, line: Mapping[str, Any], steps: int) -> None:
        """A step is done and logged; its line."""


@dataclass
class Trained:
    """What the loop came to. model: the fine-tuned one's state, None where it stayed frozen or in other processes."""

    held_out: Mapping[str, float]
    calibration: Mapping[str, Any]
    tokens: int
    pupil: Pupil | None = None
    state: Mapping[str, Tensor] | None = None


class Trainer:
    """One training in one process, from its plan to what is to be saved."""

    def __init__(self, plan: Plan, accelerator: Accelerator, watch: Watcher) -> None:
        self.plan = plan
        self.settings = plan.settings
        self.learner: Learner = plan.learner
        self.accelerator = accelerator
        self.watch = watch
        self.finetune = plan.settings.finetune
        self.device = torch.device("cpu")
        self.pupil: Any = None
        self.teacher: Any = None
        self.model_optimiser: Any = None
        self.order = Order(
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
        optimisers = Optimisers(self.learner, self.accelerator, self.settings.lr, self.pupil, self.model_optimiser)
        kept = (self.learner, optimisers.scorer, self.accelerator, self.finetune)
        finished = checkpoint.restore(folder, *kept)
        if self.accelerator.is_main_process:
            checkpoint.cut_log(folder, finished)
        for step in range(finished, steps):
            line = self._step(step, optimisers)
            if self.accelerator.is_main_process:
                checkpoint.append(folder, line)
                self.watch.step(line, steps)
            if (step + 1) % self.settings.save_every == 0 and step + 1 < steps:
                checkpoint.save(folder, step + 1, *kept)
        return self._finish()

    def batch(self, indices: Sequence[int], step: int, name: str, budget: int) -> Batch:
        """Blocks of one length as a batch; `name` tells its noise from that of others in the same step."""
        blocks = [self.plan.blocks[index] for index in indices]
        generator = torch.Generator(self.device).manual_seed(seed_of(self.settings.seed, "noise", step, name))
        features = rows(self._store.read, blocks) if self._store is not None and self.from_store else None
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
        """The loss of a batch: the scorer's, and with `finetune` the model's divergence (`kl`) added to it."""
        if not self.finetune:
            return self.learner.loss(batch)
        top = self.teacher(batch.tokens)
        following = Following(self.learner.attention(batch))
        kl: Tensor = self.pupil(batch.tokens, *top, following)
        features = following.features()
        parts = {"kl": float(kl.detach())}
        if features is None:
            return Losses(kl, parts)
        if any(tensor.requires_grad for tensor in features.values()):
            raise RunFailed("The learner's features carry gradients into the model: they have to be detached.")
        own = self.learner.loss(dataclasses.replace(batch, features=features))
        return Losses(kl + own.total.to(kl.device), {**parts, "score": float(own.total.detach()), **own.parts})

    def _set_up(self) -> None:
        """Collect what is stored, place everything, and let the learner look at some texts."""
        if self.from_store:
            self._collect()
        if not self.from_store or self._looks_at_model:
            self.device = self.model.device
        elif self.settings.device not in ("cpu", "mps") and torch.cuda.is_available():
            chosen = torch.device(self.settings.device) if ":" in self.settings.device else self.accelerator.device
            self.device = chosen
        self.learner.to(self.device)
        self._check_learner_alone()
        looked_at = [self.order.block(place) for place in range(min(LOOKED_AT, self.plan.train_blocks))]
        blocks = [self.plan.blocks[index] for index in looked_at]
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
        """The frozen model as teacher, and a copy of it that is trained."""
        check_head(self.model)
        self.watch.phase("loading the weights that are trained")
        alone = self.accelerator.num_processes == 1
        device = self.settings.device if alone else "cpu"
        wide = "float32" if self.settings.dtype == "auto" else self.settings.dtype
        student = load.load_model(self.plan.source, device, wide, self.settings.trust_remote_code)
        attention.use(student)
        student.train()
        older: Any = getattr(student, "gradient_checkpointing_enable", None)
        getattr(student, "activation_checkpointing_enable", older)({"use_reentrant": False})
        self.teacher, pupil = Teacher(self.model), Pupil(student)
        self.pupil, self.model_optimiser = prepare(pupil, self.accelerator, self.settings.model_lr)

    def _step(self, step: int, optimisers: Optimisers) -> dict[str, Any]:
        """One step; its line for the log, with the numbers of this process."""
        began = time.monotonic()
        settings = self.settings
        torch.manual_seed(seed_of(settings.seed, "global", step, self.accelerator.process_index))
        sums: dict[str, list[float]] = {}
        budgets, tokens = [], 0
        for place, indices in enumerate(self.order.passes_of(step)):
            name = f"{self.accelerator.process_index}-{place}"
            budgets.append(drawn(settings.seed, step, name, self.plan.checked.budgets))
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
        said = optimisers.step(learning_rate(step, settings.steps, settings.lr))
        return {
            "step": step + 1,
            **_means(sums),
            **said,
            "budget": budgets[0] if len(budgets) == 1 else budgets,
            "tokens": tokens,
            "seconds": round(time.monotonic() - began, 4),
        }

    def _finish(self) -> Trained:
        """The held-out loss, the calibration, and the fine-tuned model's state."""
        held_out = self._held_out_loss()
        calibration: Mapping[str, Any] = {}
        if type(self.learner).calibrate is not Learner.calibrate:
            self.watch.phase("calibrating")
            blocks = [self.plan.blocks[index].to(self.model.device) for index in self.plan.held_out]
            with torch.no_grad():
                calibration = self.learner.calibrate(self.model, blocks)
        tokens = sum(line["tokens"] for line in checkpoint.read_log(self.settings.out))
        trained = Trained(held_out, calibration, tokens)
        if self.finetune:
            state = self.accelerator.get_state_dict(self.pupil)
            if self.accelerator.is_main_process:
                trained.pupil = self.accelerator.unwrap_model(self.pupil)
                trained.state = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        return trained

    def _held_out_loss(self) -> dict[str, float]:
        """Means over the held-out blocks, at each of the budgets in turn."""
        sums: dict[str, list[float]] = {}
        if self.plan.held_out:
            self.watch.phase("the loss on held-out blocks")
        for place, index in enumerate(self.plan.held_out):
            budget = self.plan.checked.budgets[place % len(self.plan.checked.budgets)]
            with torch.no_grad(), self.accelerator.autocast():
                losses = self.losses(self.batch([index], self.settings.steps - 1, f"held-out-{place}", budget))
            _add(sums, {"loss": float(losses.total), **losses.parts})
        return _means(sums)

    def _collect(self) -> None:
        """Make the features that the store lacks, each process its share."""
        assert self._store is not None
        wanted = [*self.order.used(self.settings.steps, LOOKED_AT), *self.plan.held_out]
        mine = wanted[self.accelerator.process_index :: self.accelerator.num_processes]
        missing = self._store.missing(self.plan.blocks, mine)
        if missing:
            self.learner.to(self.model.device)
            self.watch.phase("collecting features")
            for done in self._store.collect(self.plan.blocks, missing, self.model, self.learner):
                self.watch.collected(len(mine) - len(missing) + done, len(mine))
            if not self._looks_at_model:
                del self.__dict__["model"]  # the cached property: its memory is the scorer's from here on
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        self.accelerator.wait_for_everyone()

    @property
    def _looks_at_model(self) -> bool:
        """Whether the model is needed after the last step."""
        return type(self.learner).calibrate is not Learner.calibrate

    def _features(self, tokens: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return self.learner.features(self.model, tokens.to(self.model.device))

    def _make_store(self) -> Store:
        settings = self.settings
        depends_on = {
            "weights": self.plan.sha256,
            "dtype": self.plan.dtype,
            **self.learner.feature_settings(),
        }
        return Store(settings.store or settings.out / STORE, depends_on)

    def _check_learner_alone(self) -> None:
        """A learner that holds the model as a submodule would train and save it."""
        from transformers import PreTrainedModel

        if any(isinstance(module, PreTrainedModel) for module in self.learner.modules()):
            raise UserError("The learner holds the model as a part of itself: it is given the model with every batch.")


def _add(sums: dict[str, list[float]], parts: Mapping[str, float]) -> None:
    """Note one pass's numbers; what is not finite says that there was nothing to measure."""
    for part, number in parts.items():
        if math.isfinite(number):
            sums.setdefault(part, []).append(float(number))


def _means(sums: Mapping[str, list[float]]) -> dict[str, float]:
    return {part: sum(numbers) / len(numbers) for part, numbers in sums.items()}
