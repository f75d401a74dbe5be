"""The oracle: evicts by the attention that a dense run over the same text still pays. A yardstick, not a method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from evictbench.errors import UserError
from evictbench.policy import GROUP_DIM, Granularity, ModelShape, NewEntries, Policy, SlotTensor, Step
from evictbench.policy.plot_style import DASHED, PlotStyle

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy import DenseRun

LEAST_LABEL = -(2.0**20)
"""The label of a token that no query attends to from behind the window; a float32 logarithm is never so low."""

UNLABELLED = -(2.0**24)
"""The priority of an unlabelled token at position 0; each later position adds 1. These are whole numbers, exact in
float32, and below every label up to position 15 million."""


@dataclass(frozen=True)
class Settings:
    """label: how a token's attention from queries `window` or more tokens after it is reduced, "mean" or "max".
    shares: who shares one kept set: a KV "head", a "layer" or the "model". sinks, window: first and last positions that
    are protected, as in the learned policies (window counts the query's own entry, and the label begins behind it).
    ahead: the most tokens of its own answer that the dense run generates, where an answer is generated."""

    label: Literal["mean", "max"] = "mean"
    shares: Granularity = "head"
    sinks: int = 4
    window: int = 32
    ahead: int = 64

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1), ("ahead", 0)):
            if getattr(self, name) < least:
                raise UserError(f"oracle: {name} must be {least} or more, not {getattr(self, name)}.")
        for name, allowed in (("label", ("mean", "max")), ("shares", ("head", "layer", "model"))):
            if getattr(self, name) not in allowed:
                raise UserError(f"oracle: {name} is {', '.join(allowed)}, not {getattr(self, name)!r}.")


class Oracle(Policy):
    """A yardstick of ours: the future attention that KVpop's scorer is trained to predict, known from a dense run.

    Let p_{u→t} be the dense run's attention from query u to token t in one query head, for S tokens. label=mean is
    m_t = Σ_{u ≥ t+window} p_{u→t} / max(1, S - t - window), label=max is m_t = max_{u ≥ t+window} p_{u→t}. A KV head's
    label is the largest m_t of its query heads. Where a layer or the model shares one kept set, the KV heads'
    labels are reduced before the logarithm, by their mean (label=mean) or their maximum (label=max). The static
    priority is the logarithm of the label, without decay by age (γ = 1) and without KVpop's ε, which only makes ties.

    Where the continuation is given (fidelity), the dense run reads prompt and continuation, so that every token has a
    label. Where an answer is generated, it reads the whole prompt, question included, and then its own greedy answer of
    up to `ahead` tokens, because what an answer copies is looked up while it is written; ahead=0 is the prompt alone.
    The tokens that the run under eviction generates have no label. Behind the window they are evicted oldest first,
    before any token that has a label.

    The oracle is no bound: labels say how much a token is attended to when nothing is evicted, not what its loss costs.
    The labels are not part of the cache's state and are not counted in its bytes.
    """

    name = "oracle"
    summary = "future attention, known from a dense run over the same text; a yardstick"
    paper = "-"
    plot_style = PlotStyle("#000000", "*", DASHED, yardstick=True, place=1)
    Config = Settings
    prefill = "bounded"
    static = True
    needs_labels = True

    def __init__(self, config: Settings | None = None) -> None:
        super().__init__(config)
        self.granularity = self.config.shares

    @property
    def sinks(self) -> int:
        """How many first positions are never evicted."""
        return int(self.config.sinks)

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """How many last positions are never evicted, whatever the budget."""
        return int(self.config.window)

    @property
    def lookahead(self) -> int:
        """How many tokens of its own answer the dense run reads, at most."""
        return int(self.config.ahead)

    def labels(self, run: DenseRun) -> list[Tensor]:
        """Each layer's log-labels, `[kv_heads, tokens]` float32, by the dense run; equal rows where a set is shared."""
        from evictbench.policy.future_attention import future_attention

        labels: list[Tensor] = []

        def watch(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
            config = self.config
            label = future_attention(query, key, window=config.window, scaling=scaling, label=config.label)
            label = label.amax(GROUP_DIM)[0]
            labels.append(label if config.shares == "head" else self._shared(label).expand_as(label))

        run(watch)
        if self.config.shares == "model":
            import torch

            shared = self._shared(torch.stack([label[0].to(labels[0].device) for label in labels]))
            labels = [shared.to(label.device).expand_as(label) for label in labels]
        return [label.float().clamp(min=LEAST_LABEL) for label in labels]

    def _shared(self, labels: Tensor) -> Tensor:
        """The log of the labels' mean or maximum, `[1, tokens]`. labels: `[heads or layers, tokens]`, logarithms."""
        if self.config.label == "max":
            return labels.amax(0, keepdim=True)
        return labels.logsumexp(0, keepdim=True) - math.log(labels.shape[0])

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """`priority`, one number for each entry."""
        import torch

        return {"priority": SlotTensor(torch.float32)}

    def enter(self, entering: NewEntries) -> Mapping[str, Tensor]:
        """The priority of each new entry: its label, or for an unlabelled entry UNLABELLED plus its position."""
        import torch

        labels = entering.labels
        assert labels is not None
        queue = UNLABELLED + entering.positions[:, None].float()
        return {"priority": torch.where(labels.isnan(), queue, labels)}

    def score(self, step: Step) -> Tensor:
        """The priority of each entry, `[rows, sets, slots]`."""
        priority = step.state["priority"]
        return priority if self.config.shares == "head" else priority[:, :1]
