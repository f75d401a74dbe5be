"""KVpop's training: scorers of all layers, their decay, the ranking loss, and the model's sparse pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from evictbench.errors import UserError
from evictbench.policy.future_attention import Label
from evictbench.policy.learner import Batch, Features, Learner, Losses, Training, Visible
from evictbench.train.sparse_attention import visible_normalisers

from . import COUNTED, scorers
from .features import Recorder, label_name, record, unrotated
from .loss import ranking_loss, recall
from .protection import Protection
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
        self.protection = _protection(policy, training)
        self.scorer = scorers.SCORERS[policy.scorer](heads, shape.head_dim, recipe.hidden, recipe.head_norm)
        self.gamma = nn.Parameter(torch.zeros(heads))
        self.shape = shape
        self.label: Label = policy.config.label
        self.temperature = recipe.temperature
        self.charged = policy.charge(shape).fixed
        self.recipe = recipe
        self.length = training.length
        self.budgets = training.budgets
        sinks, window = self.protection.sinks, self.protection.window
        least = sinks + window + self.charged + 1
        if min(training.budgets) < least:
            raise UserError(
                f"{policy.name} needs a budget of at least {least} entries in training ({sinks} sinks, a window "
                f"of {window}, {self.charged} for its state, and one to choose), not {min(training.budgets)}."
            )

    def cut(self, budget: int) -> dict[str, int]:
        """Sinks, the protected last positions, and the pool that is chosen under a budget, as a cache with these
        weights divides it."""
        entries = budget - self.charged
        protection = self.protection
        return {"sinks": protection.sinks, "window": protection.last(entries), "pool": protection.pool(entries)}

    @property
    def windows(self) -> tuple[int, ...]:
        """The protected last positions under any of the budgets."""
        return tuple(sorted({self.cut(budget)["window"] for budget in self.budgets}))

    def feature_settings(self) -> Mapping[str, Any]:
        """The windows; both labels are in the features, so that their trainings share them."""
        return {"learner": "kvpop", "windows": self.windows, "epsilon": "1e-9"}

    def features(self, model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
        """Keys, values and both labels of every layer."""
        return record(model, tokens, self.windows)

    def measure(self, samples: Iterable[Features]) -> None:
        """Standardise the inputs by the first blocks."""
        taken = (sample for _, sample in zip(range(STATISTICS_BLOCKS), samples, strict=False))
        self.scorer.measure((_by_head(sample["keys"]), _by_head(sample["values"])) for sample in taken)

    def loss(self, batch: Batch) -> Losses:
        """The ranking loss over all heads. Part: `recall`, the share of the teacher's final pool in the scorer's."""
        assert batch.features is not None
        device = self.gamma.device
        keys, values = (_by_head(batch.features[name]) for name in ("keys", "values"))
        cut = self.cut(batch.budget)
        label = _by_head(batch.features[label_name(self.label, cut["window"])]).to(device).float()
        log_gamma = bounded_log_gamma(self.gamma)
        score = self._score(keys, values, cut["window"])
        teacher, student = priority(label, log_gamma.detach()), priority(score, log_gamma)
        total = ranking_loss(teacher, student, temperature=self.temperature, **cut)
        with torch.no_grad():
            shared = recall(teacher, student, **cut)
        return Losses(total, {"recall": shared})

    def _score(self, keys: Tensor, values: Tensor, window: int) -> Tensor:
        """Scores `[rows, heads, S]` of keys and values `[rows, heads, S, head_dim]`, a part of the heads at a time, as
        tokens leave the window."""
        from torch.utils.checkpoint import checkpoint

        rows, heads, length, head_dim = keys.shape
        device = self.gamma.device
        size = max(1, ELEMENTS_AT_ONCE // max(1, rows * length * 2 * head_dim))
        if size >= heads:
            scores: Tensor = self.scorer(keys.to(device), values.to(device), window)
            return scores
        names = list(self.scorer.state_dict())

        def score_part(part: slice, *tensors: Tensor) -> Tensor:
            state = dict(zip(names, tensors, strict=True))
            inputs = keys[:, part].to(device), values[:, part].to(device), window
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
            "settings": {
                **asdict(self.recipe),
                **asdict(self.protection),
                COUNTED: "protected",
                "label": self.label,
            },
            "protected": {str(budget): self.cut(budget)["window"] for budget in self.budgets},
            "notes": [
                PURPOSE[self.label],
                "Trained for the last positions that are protected in use: "
                + ", ".join(f"{self.cut(budget)['window']} of {budget} entries" for budget in self.budgets)
                + ".",
                f"The texts had up to {self.length} tokens: what is needed later than that was not to be learned.",
            ],
            "decay": {"least": float(gamma.min()), "mean": float(gamma.mean()), "largest": float(gamma.max())},
        }


class _SparsePass:
    """One sparse pass: in each layer, the scorer ranks the layer's keys, which gives the expiry of each. Labels have
    the normalisers of that sparse attention, as published."""

    def __init__(self, learner: ScorerLearner, model: PreTrainedModel, budget: int) -> None:
        self.learner = learner
        self.cut = learner.cut(budget)
        self.recorder = Recorder(model, (self.cut["window"],), torch.float32, (learner.label,))

    def visible(self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Visible:
        """The expiry of this layer's keys, by the scorer in its present state."""
        learner = self.learner
        scaling = float(getattr(module, "scaling", query.shape[-1] ** -0.5))
        kv_heads = learner.shape.kv_heads
        part = learner.scorer.part(slice(layer * kv_heads, (layer + 1) * kv_heads), key.device)
        gamma = bounded_log_gamma(learner.gamma.detach()[layer * kv_heads : (layer + 1) * kv_heads]).to(key.device)
        keys = unrotated(key, self.recorder.inv_freq.to(key.device))
        ranked = priority(part(keys.float(), value.float(), self.cut["window"]), gamma)
        visible = Visible(sequence_expiry(ranked, **self.cut))
        self.recorder(layer, module, query, key, value, scaling, visible_normalisers(query, key, visible, scaling))
        return visible

    def features(self) -> Features:
        """The features of the pass."""
        return self.recorder.features()


def _protection(policy: _Ranked, training: Training) -> Protection:
    """What training protects: --window, and sinks and share of the recipe. Raises UserError where the policy's own
    settings name others, which a cache with these weights would then have."""
    found = Protection(int(training.recipe.sinks), training.window, float(training.recipe.recent))
    for name, option in (("sinks", "--recipe sinks"), ("window", "--window"), ("recent", "--recipe recent")):
        given, trained = getattr(policy.config, name), getattr(found, name)
        if given is not None and given != trained:
            raise UserError(
                f"{policy.name} is asked to protect {name} {given:g} and trained with {trained:g}: say "
                f"{option}={given:g}."
            )
    return found


def _by_head(tensor: Tensor) -> Tensor:
    """Layers and KV heads in one dimension: `[rows, layers · kv_heads, ...]` of `[rows, layers, kv_heads, ...]`."""
    return tensor.flatten(1, 2)
