"""KVpop's training: scorers of all layers, their decay, the ranking loss, and the model's sparse pass."""

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
from .ranking import bounded_log_gamma, priority, sequence_expiry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.policy import ModelShape

    from . import _Ranked

ELEMENTS_AT_ONCE = 2**27
"""Elements of the inputs that are scored at a time, a whole number of heads; the backward pass computes the others
again."""

PURPOSE = {
    "mean": "The label is a token's mean attention from behind the window: for text that is read on.",
    "max": "The label is the largest attention from behind the window: for text in which things are looked up once.",
}

STATISTICS_BLOCKS = 16
"""Blocks from which the inputs are standardised."""


class ScorerLearner(Learner):
    """The scorer in training, from features of the frozen model; with `finetune`, from those of the model's own sparse
    pass, which the scorer's ranking masks."""

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
        self.charged = policy.charge(shape).fixed
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
        """The window; both labels are in the features, so that their trainings share them."""
        return {"learner": "kvpop", "window": self.window, "epsilon": "1e-9"}

    def features(self, model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
        """Keys, values and both labels of every layer."""
        return record(model, tokens, self.window)

    def measure(self, samples: Iterable[Features]) -> None:
        """Standardise the inputs by the first blocks."""
        taken = (sample for _, sample in zip(range(STATISTICS_BLOCKS), samples, strict=False))
        self.scorer.measure((_by_head(sample["keys"]), _by_head(sample["values"])) for sample in taken)

    def loss(self, batch: Batch) -> Losses:
        """The ranking loss over all heads. Part: `recall`, the share of the teacher's final pool in the scorer's."""
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
            shared = recall(teacher, student, **cut)
        return Losses(total, {"recall": shared})

    def _score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Scores `[rows, heads, S]` of keys and values `[rows, heads, S, head_dim]`, a part of the heads at a time."""
        from torch.utils.checkpoint import checkpoint

        rows, heads, length, head_dim = keys.shape
        device = self.gamma.device
        size = max(1, ELEMENTS_AT_ONCE // max(1, rows * length * 2 * head_dim))
        if size >= heads:
            scores: Tensor = self.scorer(keys.to(device), values.to(device), self.window)
            return scores
        names = list(self.scorer.state_dict())

        def score_part(part: slice, *tensors: Tensor) -> Tensor:
            state = dict(zip(names, tensors, strict=True))
            inputs = keys[:, part].to(device), values[:, part].to(device), self.window
            scores: Tensor = torch.func.functional_call(self.scorer, state, inputs)
            return scores

        parts = []
        for start in range(0, heads, size):
            part = slice(start, start + size)
            tensors = [getattr(self.scorer, name)[part] for name in names]
            parts.append(checkpoint(score_part, part, *tensors, use_reentrant=False))
        return torch.cat(parts, dim=1)

    def attention(self, batch: Batch) -> _SparsePass:
        """Follow a sparse pass of the model that is being fine-tuned."""
        assert batch.model is not None
        return _SparsePass(self, batch.model, batch.budget)

    def export(self) -> dict[str, Tensor]:
        """The scorer's tensors and `gamma`, by name."""
        return {**{name: t.detach() for name, t in self.scorer.state_dict().items()}, "gamma": self.gamma.detach()}

    def card(self) -> Mapping[str, Any]:
        """The scorer's settings, its decay and its limits."""
        gamma = bounded_log_gamma(self.gamma.detach()).exp()
        return {
            "settings": {**asdict(self.recipe), "window": self.window, "label": self.label},
            "notes": [
                PURPOSE[self.label],
                f"The texts had up to {self.length} tokens: what is needed later than that was not to be learned.",
            ],
            "decay": {"least": float(gamma.min()), "mean": float(gamma.mean()), "largest": float(gamma.max())},
        }


class _SparsePass:
    """One sparse pass: in each layer, the scorer ranks the layer's keys, which gives the expiry of each."""

    def __init__(self, learner: ScorerLearner, model: PreTrainedModel, budget: int) -> None:
        self.learner = learner
        self.pool = learner.pool(budget)
        self.recorder = Recorder(model, learner.window, torch.float32)

    def visible(self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Visible:
        """The expiry of this layer's keys, by the scorer in its present state."""
        learner = self.learner
        scaling = float(getattr(module, "scaling", query.shape[-1] ** -0.5))
        self.recorder(layer, module, query, key, value, scaling)
        kv_heads = learner.shape.kv_heads
        part = learner.scorer.part(slice(layer * kv_heads, (layer + 1) * kv_heads), key.device)
        gamma = bounded_log_gamma(learner.gamma.detach()[layer * kv_heads : (layer + 1) * kv_heads]).to(key.device)
        keys = unrotated(key, self.recorder.inv_freq.to(key.device))
        ranked = priority(part(keys.float(), value.float(), learner.window), gamma)
        return Visible(sequence_expiry(ranked, sinks=learner.sinks, window=learner.window, pool=self.pool))

    def features(self) -> Features:
        """The features of the pass; the labels are of the student's dense attention."""
        return self.recorder.features()


def _by_head(tensor: Tensor) -> Tensor:
    """Layers and KV heads in one dimension: `[rows, layers · kv_heads, ...]` of `[rows, layers, kv_heads, ...]`."""
    return tensor.flatten(1, 2)
