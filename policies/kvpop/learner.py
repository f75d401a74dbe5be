"""KVpop's trainable side: scorers of all layers, their decay, the ranking loss, and the sparse student."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from evictbench.errors import UserError
from evictbench.policy.learner import Batch, Features, Learner, Losses, Training, Visible

from . import scorers
from .features import Recorder, record, unrotated
from .loss import ranking_loss, recall
from .ranking import bounded_log_gamma, priority, sequence_deadlines

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.policy import ModelShape

    from . import _Ranked

ELEMENTS_AT_ONCE = 2**27
"""Inputs of so many heads are scored at a time that they have about this many elements; what the backward pass needs
of the other heads is computed again."""

PURPOSE = {
    "mean": "The label is a token's mean attention from behind the window: for text that is read on.",
    "max": "The label is the largest attention from behind the window: for text in which things are looked up once.",
}

MEASURED = 16
"""Blocks whose statistics standardise the inputs."""


class ScorerLearner(Learner):
    """The scorer alone, from features of the frozen model; or, with the model fine-tuned, from those of its own sparse
    pass, which is masked by the scorer's ranking."""

    stored: ClassVar[bool] = True
    held_out: ClassVar[int] = 8

    def __init__(self, policy: _Ranked, shape: ModelShape, training: Training) -> None:
        super().__init__()
        recipe = training.recipe
        heads = shape.layers * shape.kv_heads
        self.scorer = scorers.SCORERS[policy.scorer](heads, shape.head_dim, recipe.hidden)
        self.gamma = nn.Parameter(torch.zeros(heads))
        self.shape = shape
        self.label = str(policy.config.label)
        self.sinks = int(recipe.sinks)
        self.window = training.window
        self.temperature = recipe.temperature
        self.charged = policy.charged_state(shape)
        self.recipe = recipe
        self.length = training.length
        least = self.sinks + self.window + self.charged + 1
        if min(training.budgets) < least:
            raise UserError(
                f"{policy.name} needs a budget of at least {least} entries in training ({self.sinks} sinks, a window "
                f"of {self.window}, {self.charged} for its state, and one to choose), not {min(training.budgets)}."
            )

    def pool(self, budget: int) -> int:
        """Entries of a budget that are ranked."""
        return budget - (self.sinks + self.window + self.charged)

    def feature_settings(self) -> Mapping[str, Any]:
        """Window and kind: both labels are in the features, so that both trainings share them."""
        return {"learner": "kvpop", "window": self.window, "epsilon": "1e-9"}

    def features(self, model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
        """Keys, values and both labels of every layer."""
        return record(model, tokens, self.window)

    def measure(self, samples: Iterable[Features]) -> None:
        """Standardise the inputs by the first blocks."""
        taken = (sample for _, sample in zip(range(MEASURED), samples, strict=False))
        self.scorer.measure((_by_head(sample["keys"]), _by_head(sample["values"])) for sample in taken)

    def loss(self, batch: Batch) -> Losses:
        """The ranking loss over all heads, and how much of the teacher's pool the scorer's holds at the end."""
        assert batch.features is not None
        device = self.gamma.device
        keys, values = (_by_head(batch.features[name]) for name in ("keys", "values"))
        label = _by_head(batch.features[self.label]).to(device).float()
        log_gamma = bounded_log_gamma(self.gamma)
        score = self._score(keys, values)
        teacher, student = priority(label, log_gamma.detach()), priority(score, log_gamma)
        cut = {"sinks": self.sinks, "window": self.window, "pool": self.pool(batch.budget)}
        total = ranking_loss(teacher, student, temperature=self.temperature, **cut)
        with torch.no_grad():
            found = recall(teacher, student, **cut)
        return Losses(total, {"recall": found})

    def _score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Scores `[rows, heads, S]`, some heads at a time where all are too many."""
        from torch.utils.checkpoint import checkpoint

        rows, heads, length, head_dim = keys.shape
        device = self.gamma.device
        size = max(1, ELEMENTS_AT_ONCE // max(1, rows * length * 2 * head_dim))
        if size >= heads:
            scores: Tensor = self.scorer(keys.to(device), values.to(device), self.window)
            return scores
        names = list(self.scorer.state_dict())

        def some(part: slice, *tensors: Tensor) -> Tensor:
            of_part = dict(zip(names, tensors, strict=True))
            inputs = keys[:, part].to(device), values[:, part].to(device), self.window
            scores: Tensor = torch.func.functional_call(self.scorer, of_part, inputs)
            return scores

        found = []
        for start in range(0, heads, size):
            part = slice(start, start + size)
            tensors = [getattr(self.scorer, name)[part] for name in names]
            found.append(checkpoint(some, part, *tensors, use_reentrant=False))
        return torch.cat(found, dim=1)

    def attention(self, batch: Batch) -> _Student:
        """Follow a sparse pass of the model that is being fine-tuned."""
        assert batch.model is not None
        return _Student(self, batch.model, batch.budget)

    def export(self) -> dict[str, Tensor]:
        """The scorer's tensors, and `gamma`."""
        return {**{name: t.detach() for name, t in self.scorer.state_dict().items()}, "gamma": self.gamma.detach()}

    def card(self) -> Mapping[str, Any]:
        """What the scorer is."""
        gamma = bounded_log_gamma(self.gamma.detach()).exp()
        return {
            "settings": {**asdict(self.recipe), "window": self.window, "label": self.label},
            "notes": [
                PURPOSE[self.label],
                f"The texts had up to {self.length} tokens: what is needed later than that was not to be learned.",
            ],
            "decay": {"least": float(gamma.min()), "mean": float(gamma.mean()), "largest": float(gamma.max())},
        }


class _Student:
    """One sparse pass: in each layer, the scorer ranks that layer's keys and says until when each is seen."""

    def __init__(self, learner: ScorerLearner, model: PreTrainedModel, budget: int) -> None:
        self.learner = learner
        self.pool = learner.pool(budget)
        self.recorder = Recorder(model, learner.window, torch.float32)

    def visible(self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Visible:
        """Deadlines of this layer's keys, from the scorer as it is."""
        learner = self.learner
        scaling = float(getattr(module, "scaling", query.shape[-1] ** -0.5))
        self.recorder(layer, module, query, key, value, scaling)
        kv_heads = learner.shape.kv_heads
        part = learner.scorer.part(slice(layer * kv_heads, (layer + 1) * kv_heads), key.device)
        gamma = bounded_log_gamma(learner.gamma.detach()[layer * kv_heads : (layer + 1) * kv_heads]).to(key.device)
        keys = unrotated(key, self.recorder.inv_freq.to(key.device))
        ranked = priority(part(keys.float(), value.float(), learner.window), gamma)
        return Visible(sequence_deadlines(ranked, sinks=learner.sinks, window=learner.window, pool=self.pool))

    def features(self) -> Features:
        """What the student's own pass showed; its labels are from its dense normalisers."""
        return self.recorder.features()


def _by_head(tensor: Tensor) -> Tensor:
    """Layers and KV heads as one dimension: `[rows, layers, kv_heads, ...]` to `[rows, layers · kv_heads, ...]`."""
    return tensor.flatten(1, 2)
