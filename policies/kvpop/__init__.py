"""KVpop: a scorer for each KV head, trained to predict the attention that tokens receive later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evictbench.errors import UserError
from evictbench.policy import MemoryTensor, ModelShape, NewEntries, Policy, SlotTensor, Step
from evictbench.policy.plot_style import DASH_DOT_DOT, LONG, PlotStyle

from .hub import RELEASED
from .protection import SINKS, Protection

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from evictbench.models.policy_weights import Weights
    from evictbench.policy.budget import Budget
    from evictbench.policy.learner import Learner, Training

    from .scorers import MLPScorer

__all__ = ["KVpop", "KVpopMLP"]


COUNTED = "counted_from"
"""In a card's settings: what labels, loss and delay of the training count from, "protected" (window and recent share).
Weights without it count from the window alone."""


@dataclass(frozen=True)
class Settings:
    """label: the future attention that the scorer was trained to predict, its "mean" (as published) or "max", which
    keeps what is looked up once. sinks, window: protected first and last positions (window counts the query's own).
    recent: the share of the entries that is protected where that is more than the window, 0 as published. None: as in
    the weights."""

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
    """The settings of a training. hidden: the scorer's width. temperature: of the ranking loss. sinks: protected first
    positions. recent: the share of the entries that is protected as recent, in training as in use. head_norm: the
    mLSTM's answer is normalised, as in xLSTM (kvpop alone)."""

    hidden: int = 64
    temperature: float = 1.0
    sinks: int = SINKS
    recent: float = 0.0
    head_norm: bool = True


class _Ranked(Policy):
    """A pool that is ranked by a learned score, which falls with age. scorer: the network that gives the score."""

    paper = "arXiv 2607.05061 v2"
    Config = Settings
    Recipe: ClassVar[type[Any]] = Recipe
    prefill = "bounded"
    static = True
    needs_rope = True
    learned = True
    scorer: ClassVar[Literal["mlp", "mlstm"]]

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._scorer: MLPScorer | None = None
        self._log_gamma: Tensor | None = None
        self._kv_heads = 0
        self._charged = 0
        self._trained: Protection | None = None
        self._counts_recent = False
        self._parts: dict[tuple[range, torch.device], tuple[Any, Tensor]] = {}

    @property
    def variant(self) -> str:
        """The name of the weights that fit: the scorer and the label."""
        return f"{self.scorer}-{self.config.label}"

    @property
    def protection(self) -> Protection:
        """What is protected: as the settings say, else the weights, else the paper."""
        config, default = self.config, Protection()
        return Protection(
            default.sinks if config.sinks is None else int(config.sinks),
            default.window if config.window is None else int(config.window),
            default.recent if config.recent is None else float(config.recent),
        )

    @property
    def sinks(self) -> int:
        """How many first positions are never evicted."""
        return self.protection.sinks

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """The window, or the recent share of the budget (entries) where that is more; one entry is left to choose."""
        return self.protection.last(budget)

    @property
    def counted(self) -> Protection:
        """What the scorer takes for protected: labels and the mLSTM's delay end with it. Weights of before the share
        was trained with count the window alone."""
        return self.protection if self._counts_recent else replace(self.protection, recent=0.0)

    def use(self, weights: Weights, shape: ModelShape) -> None:
        """Take a scorer's tensors for `layers · kv_heads` heads, and `gamma`, which gives the decay. Sinks, window and
        recent share that the settings leave open are those of the training. UserError: the tensors do not fit."""
        from . import scorers
        from .ranking import bounded_log_gamma

        trained = weights.card.get("settings") or {}
        for name, kind in (("sinks", int), ("window", int), ("recent", float)):
            if getattr(self.config, name) is None and name in trained:
                self.config = replace(self.config, **{name: kind(trained[name])})
        self._counts_recent = trained.get(COUNTED) == "protected"
        self._trained = None
        if "window" in trained:
            share = float(trained.get("recent", 0.0)) if self._counts_recent else 0.0
            self._trained = Protection(int(trained.get("sinks", SINKS)), int(trained["window"]), share)
        tensors = {name: tensor.float() for name, tensor in weights.tensors.items()}
        gamma = tensors.pop("gamma", None)
        heads = shape.layers * shape.kv_heads
        self._scorer = scorers.SCORERS[self.scorer].of(tensors, heads, shape.head_dim, weights.origin)
        if gamma is None or gamma.shape != (heads,):
            raise UserError(f"The weights {weights.origin} have no decay for each of {heads} KV heads.")
        self._log_gamma = bounded_log_gamma(gamma)
        self._kv_heads = shape.kv_heads
        self._charged = self.charge(shape).fixed
        self._parts = {}

    def doubts(self, budget: Budget) -> Iterator[str]:
        """That more or less is protected than the weights were trained for."""
        trained, used = self._trained, self.protection
        if trained is None:
            return
        if budget.tokens is None:
            if (trained.window, trained.recent) != (used.window, used.recent):
                yield (
                    f"{self.name} protects {_in_words(used)}, and its weights were trained for {_in_words(trained)}: "
                    "what a token is worth behind the one is not what it is worth behind the other."
                )
            return
        entries = budget.tokens - self._charged
        if trained.last(entries) != used.last(entries):
            yield (
                f"{self.name} protects the last {used.last(entries)} positions at {budget} entries, and its weights "
                f"were trained for {trained.last(entries)}."
            )

    def learner(self, shape: ModelShape, training: Training) -> Learner:
        """The trainable side: the scorer and its decay."""
        from .learner import ScorerLearner

        return ScorerLearner(self, shape, training)

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """`priority`, the static priority `r_t - t · log gamma` of each entry."""
        import torch

        return {"priority": SlotTensor(torch.float32)}

    def score(self, step: Step) -> Tensor:
        """The static priority of each entry, `[rows, kv_heads, slots]`."""
        return step.state["priority"]

    def scorer_of_layers(self, layers: range, device: torch.device) -> tuple[Any, Tensor]:
        """The scorer of neighbouring layers' heads and their log gamma `[len(layers) · kv_heads]`, on a device."""
        if self._scorer is None or self._log_gamma is None:
            raise UserError(f"{self.name} has no weights yet: give it some with use().")
        if (layers, device) not in self._parts:
            heads = slice(layers.start * self._kv_heads, layers.stop * self._kv_heads)
            self._parts[layers, device] = self._scorer.part(heads, device), self._log_gamma[heads].to(device)
        return self._parts[layers, device]


def _in_words(protection: Protection) -> str:
    share = f", and {protection.recent:.0%} of the entries where that is more" if protection.recent else ""
    return f"a window of {protection.window}{share}"


class KVpopMLP(_Ranked):
    """Hauzenberger et al., "KVpop", arXiv 2607.05061 v2, with the two-layer scorer.

    The cache holds sinks, a recent window and a pool. When the pool is full, the token that leaves the window replaces
    the pool's worst entry if it ranks above it. A token is scored once, as it enters, from its key and value.

    Deviations, the largest first. `recent` is a share of ours, which the bundled weights bring: three quarters of the
    entries are kept as recent (a quarter with label=max) where that is more than their window of 64. Of 128 entries 4
    are sinks, 96 recent and 28 chosen; the paper's rule, with the window alone, is `recent=0` (64 recent, 60 chosen).
    On six GSM8K texts, prompts attended whole, the KL to the full cache is .0639 at 128 entries and .0109 at 256 as
    bundled, .0568 and .0189 with recent=0; H2O's is .1077 and .0157. The model of the bundled weights is not
    fine-tuned; the paper trains all of it beside the scorer, for 2,000 steps of 128 texts of 16,384 tokens, where these
    had 1,000 steps of one text of 1,024. The bundled weights of label=mean were trained with labels and loss that count
    from 64 positions, and up to 192 are protected in use, of which a run warns; trainings now count from what is
    protected.

    What the paper leaves open: the rotation by RoPE is undone, so that the score does not depend on the token's
    position, and inputs are standardised; widths, temperature, the label's epsilon and the loss's weights are ours
    (`ranking_loss`). `label=max` is ours.
    """

    name = "kvpop_mlp"
    summary = "learned: future attention guessed from key and value, pool ranked by it"
    plot_style = PlotStyle("#360085", "X", DASH_DOT_DOT, place=9)
    scorer = "mlp"

    def enter(self, entering: NewEntries) -> Mapping[str, Tensor]:
        """The priorities of a chunk's new entries; in decode `prepare_layers` gives them."""
        if entering.positions.shape[1] == 1:
            return {}
        return {"priority": self._priority([entering])}

    def prepare_layers(self, steps: Sequence[Step]) -> None:
        """Score the new entries of a decode step, for all layers at once."""
        scored = self._priority([step.entered for step in steps])
        for step, part in zip(steps, scored.split(self._kv_heads, dim=1), strict=True):
            step.place("priority", part)

    def _priority(self, entering: Sequence[NewEntries]) -> Tensor:
        """The priorities of the new entries of neighbouring layers, `[rows, layers · kv_heads, new]`."""
        import torch

        from evictbench.cache.rope import rotate_by_angles

        from .ranking import priority

        first = entering[0]
        assert first.unrotate_angles is not None
        scorer, log_gamma = self.scorer_of_layers(range(first.layer, entering[-1].layer + 1), first.keys.device)
        keys = rotate_by_angles(torch.cat([entries.keys for entries in entering], dim=1), *first.unrotate_angles(0))
        score = scorer(keys, torch.cat([entries.values for entries in entering], dim=1))
        return priority(score, log_gamma, first.positions[:, None])


class KVpop(_Ranked):
    """Hauzenberger et al., "KVpop", arXiv 2607.05061 v2, with the mLSTM scorer.

    Unlike kvpop_mlp, it scores a token when it leaves what is protected, from its key, its value, and the answer of an
    mLSTM memory over all keys and values so far. The memory is charged as any policy's state, which gives head_dim / 2
    entries, as published (64 at head_dim 128).

    Deviations: those of kvpop_mlp, and more of them weigh. Of 128 entries the bundled weights pay 32 for the memory, 4
    are sinks, 72 recent and 20 chosen; with recent=0 64 are recent and 28 chosen. They are read when a token leaves the
    window of 64, though up to 168 positions are protected; weights trained now are read when a token leaves those. They
    had half the steps of kvpop_mlp's (500) and a width of 24 in place of 64. Their mLSTM has no norm on its answer: the
    read-out is xLSTM's, `C q / max(|n q|, 1)`, whose n q can cancel, so that an answer has no scale. xLSTM normalises
    it head by head, and so do trainings now (`Recipe.head_norm`); weights without that norm are read as they were
    trained.

    What the paper leaves open: the memory's gates and features (see MLSTMScorer). The cache evicts before the next
    query's key is known, so that a token has been followed by window - 1 others when it is scored, and not by window.
    """

    name = "kvpop"
    summary = "learned: future attention guessed by an mLSTM that has seen what followed, pool ranked by it"
    plot_style = PlotStyle("#ba3bdf", "P", LONG, place=8)
    scorer = "mlstm"
    foreign = RELEASED

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
        """Write a chunk's new tokens into the memory, and score the tokens that leave the window."""
        self.prepare_layers([step])

    def prepare_layers(self, steps: Sequence[Step]) -> None:
        """Write new tokens into the memories of neighbouring layers, and score the tokens that leave the window."""
        from .delayed import score_leaving

        layers = range(steps[0].layer, steps[-1].layer + 1)
        scorer, log_gamma = self.scorer_of_layers(layers, steps[0].keys.device)
        score_leaving(steps, scorer, log_gamma, self.delay(steps[0]))

    def delay(self, step: Step) -> int:
        """After how many positions, its own included, a token is scored: when it leaves what is protected."""
        counted = self.counted
        if not counted.recent:
            return counted.window
        assert step.budget is not None  # see check_budget
        return counted.last(step.budget)

    def check_budget(self, budget: Budget) -> None:
        """Refuse a share of the text where the delay depends on the entries: it would change while the text is read."""
        if budget.tokens is None and self.counted.recent:
            raise UserError(
                f"kvpop with these weights scores a token when it leaves the {self.counted.recent:.0%} of the entries "
                f"that are recent, which a budget of {budget} changes at every step: give a number of entries, or "
                "recent=0."
            )
