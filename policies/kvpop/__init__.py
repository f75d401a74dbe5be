"""KVpop: a scorer per KV head, trained on the attention that tokens receive later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evictbench.errors import UserError
from evictbench.policy import Entering, MemoryTensor, ModelShape, Policy, SlotTensor, Step
from evictbench.policy.budget import PARTS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from evictbench.models.policy_weights import Weights
    from evictbench.policy.learner import Learner, Training

    from .scorers import MLPScorer

__all__ = ["KVpop", "KVpopMLP"]

SINKS, WINDOW = 4, 256
"""The paper's, where neither settings nor weights say else."""


@dataclass(frozen=True)
class Settings:
    """label: what the scorer was trained to guess of a token's future attention, its "mean" (as published) or its
    "max"imum, which keeps what is looked up once. sinks, window (the query's own entry included): protected; recent:
    the share of the entries that is protected as recent where that is more than the window, 0 as published. Those of
    the weights where not given."""

    label: Literal["mean", "max"] = "mean"
    sinks: int | None = None
    window: int | None = None
    recent: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"kvpop: {name} must be {least} or more, not {value}.")
        if self.recent is not None and not 0 <= self.recent < 1:
            raise UserError(f"kvpop: recent is a share from 0 and below 1, not {self.recent:g}.")
        if self.label not in ("mean", "max"):
            raise UserError(f"kvpop: label is mean or max, not {self.label!r}.")


@dataclass(frozen=True)
class Recipe:
    """What a training can be told. hidden: width of the scorer's two layers; temperature: of the ranking loss; sinks;
    recent: the share of the entries that its user protects as recent (training ranks all that leave the window)."""

    hidden: int = 64
    temperature: float = 1.0
    sinks: int = SINKS
    recent: float = 0.0


class _Ranked(Policy):
    """A pool ranked by a learned score that falls with age; which score is for the two policies to say."""

    paper = "arXiv 2607.05061 v2"
    Config = Settings
    Recipe: ClassVar[type[Any]] = Recipe
    prefill = "bounded"
    static = True
    rotary = True
    learned = True
    scorer: ClassVar[Literal["mlp", "mlstm"]]

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._scorer: MLPScorer | None = None
        self._log_gamma: Tensor | None = None
        self._kv_heads = 0
        self._parts: dict[tuple[range, torch.device], tuple[Any, Tensor]] = {}

    @property
    def variant(self) -> str:
        """Which weights it wants: its scorer's, for its label."""
        return f"{self.scorer}-{self.config.label}"

    @property
    def sinks(self) -> int:
        """The first positions, never evicted."""
        return SINKS if self.config.sinks is None else int(self.config.sinks)

    @property
    def scored_after(self) -> int:
        """The window, of which a token's label and an mLSTM's reading are counted."""
        return WINDOW if self.config.window is None else int(self.config.window)

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """The window, or the share that is recent where that is more; one entry is left to choose."""
        share, window = round((self.config.recent or 0.0) * PARTS), self.scored_after
        if isinstance(budget, int):
            return max(window, min(share * budget // PARTS, budget - self.sinks - 1))
        import torch

        return torch.minimum(share * budget // PARTS, budget - self.sinks - 1).clamp(min=window)

    def use(self, weights: Weights, shape: ModelShape) -> None:
        """Take trained tensors: those of a scorer for `layers · kv_heads` heads, and `gamma`, from which the decay
        comes. Sinks, window and recent share that the settings leave open are those of the training."""
        from . import scorers
        from .ranking import bounded_log_gamma

        trained = weights.card.get("settings", {})
        for name, kind in (("sinks", int), ("window", int), ("recent", float)):
            if getattr(self.config, name) is None and name in trained:
                self.config = replace(self.config, **{name: kind(trained[name])})
        tensors = {name: tensor.float() for name, tensor in weights.tensors.items()}
        gamma = tensors.pop("gamma", None)
        heads = shape.layers * shape.kv_heads
        self._scorer = scorers.SCORERS[self.scorer].of(tensors, heads, shape.head_dim, weights.origin)
        if gamma is None or gamma.shape != (heads,):
            raise UserError(f"The weights {weights.origin} have no decay for each of {heads} KV heads.")
        self._log_gamma = bounded_log_gamma(gamma)
        self._kv_heads = shape.kv_heads
        self._parts = {}

    def learner(self, shape: ModelShape, training: Training) -> Learner:
        """Its trainable side."""
        from .learner import ScorerLearner

        return ScorerLearner(self, shape, training)

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """`r_t - t · log gamma` of each entry."""
        import torch

        return {"priority": SlotTensor(torch.float32)}

    def score(self, step: Step) -> Tensor:
        """The static priority, `[rows, kv_heads, slots]`."""
        return step.state["priority"]

    def of_layers(self, layers: range, device: torch.device) -> tuple[Any, Tensor]:
        """The scorer of neighbouring layers' heads and their log gamma, `[len(layers) · kv_heads]`."""
        if self._scorer is None or self._log_gamma is None:
            raise RuntimeError(f"{self.name} has no weights yet: give it some with use().")
        if (layers, device) not in self._parts:
            heads = slice(layers.start * self._kv_heads, layers.stop * self._kv_heads)
            self._parts[layers, device] = self._scorer.part(heads, device), self._log_gamma[heads].to(device)
        return self._parts[layers, device]


class KVpopMLP(_Ranked):
    """Hauzenberger et al., "KVpop", arXiv 2607.05061 v2, with the two-layer scorer.

    Sinks, a recent window and a pool: when the pool is full, the token that leaves the window takes the place of the
    pool's worst entry if it ranks above it. A token is scored once, as it enters, from its key and value.

    Deviations and what the paper leaves open: the key is turned back to before RoPE, so that the score does not depend
    on where the token stands, and inputs are standardised; widths are ours. `label=max` is ours.
    """

    name = "kvpop_mlp"
    summary = "learned: future attention guessed from key and value, pool ranked by it"
    scorer = "mlp"

    def enter(self, entering: Entering) -> Mapping[str, Tensor]:
        """Score the new entries of a chunk."""
        if entering.positions.shape[1] == 1:
            return {}  # settle does all layers at once
        return {"priority": self._priority([entering])}

    def settle(self, steps: Sequence[Step]) -> None:
        """Score the new entries of a decode step."""
        scored = self._priority([step.entered for step in steps])
        for step, part in zip(steps, scored.split(self._kv_heads, dim=1), strict=True):
            step.place("priority", part)

    def _priority(self, entering: Sequence[Entering]) -> Tensor:
        """Of the new entries of neighbouring layers, `[rows, layers · kv_heads, new]`."""
        import torch

        from evictbench.cache.rope import turn

        from .ranking import priority

        first = entering[0]
        assert first.turning_back is not None
        scorer, log_gamma = self.of_layers(range(first.layer, entering[-1].layer + 1), first.keys.device)
        keys = turn(torch.cat([one.keys for one in entering], dim=1), *first.turning_back(0))
        score = scorer(keys, torch.cat([one.values for one in entering], dim=1))
        return priority(score, log_gamma, first.positions[:, None])


class KVpop(_Ranked):
    """Hauzenberger et al., "KVpop", arXiv 2607.05061 v2, with the mLSTM scorer.

    As kvpop_mlp, but a token is scored when it leaves the window, from its key, its value, and what an mLSTM memory
    over all keys and values so far answers to it. The memory, head_dim x head_dim a KV head, is charged as head_dim / 2
    entries, as published (64 at head_dim 128); its normaliser and stabiliser, head_dim + 1 numbers more, are not.

    Deviations and what the paper leaves open: as kvpop_mlp; the memory's gates and features (see MLSTMScorer); the
    cache makes room before the next query's key is known, so that a token has been followed by window - 1 others when
    it is scored, and not by window.
    """

    name = "kvpop"
    summary = "learned: future attention guessed by an mLSTM that has seen what followed, pool ranked by it"
    scorer = "mlstm"

    def charged_state(self, shape: ModelShape) -> int:
        """The matrix memory: `head_dim² / (2 · head_dim)`."""
        return -(-shape.head_dim // 2)

    def memory(self, shape: ModelShape) -> Mapping[str, MemoryTensor]:
        """The state of each KV head's mLSTM."""
        import torch

        from .mlstm import EMPTY

        return {
            "memory": MemoryTensor(torch.float32, (shape.head_dim, shape.head_dim)),
            "normaliser": MemoryTensor(torch.float32, (shape.head_dim,)),
            "stabiliser": MemoryTensor(torch.float32, (), fill=EMPTY),
        }

    def prepare(self, step: Step) -> None:
        """Let the memory see the new tokens of a chunk, and score those that leave the window."""
        self.settle([step])

    def settle(self, steps: Sequence[Step]) -> None:
        """The same for one token and several layers."""
        from .delayed import score_leaving

        layers = range(steps[0].layer, steps[-1].layer + 1)
        scorer, log_gamma = self.of_layers(layers, steps[0].keys.device)
        score_leaving(steps, scorer, log_gamma, self.scored_after)
