"""The oracle: evicts by what a dense run over the same text will still attend to. A yardstick, not a method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from evictbench.errors import UserError
from evictbench.policy import GROUP_DIM, Entering, ModelShape, Policy, Shares, SlotTensor, Step

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy import DenseRun

LEAST_LABEL = -(2.0**20)
"""The label of a token that nothing attends to from behind the window; a float32 logarithm is never so low."""

UNLABELLED = -(2.0**24)
"""The priority of an unlabelled token at position 0; each later one has one more. Whole numbers, exact in float32, and
below every label up to position 15 million."""


@dataclass(frozen=True)
class Settings:
    """label: of a token's attention from queries at `window` or more tokens behind it, the "mean" or the "max"imum.
    shares: each KV "head" has its own kept set, a "layer" has one, or the "model" has. sinks and window (the query's
    own entry included) are protected, as in the learned policies; window is also where the label begins. ahead: tokens
    that the dense run writes on by itself, at most, where an answer is generated."""

    label: Literal["mean", "max"] = "mean"
    shares: Shares = "head"
    sinks: int = 4
    window: int = 32
    ahead: int = 64

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1), ("ahead", 0)):
            if getattr(self, name) < least:
                raise UserError(f"oracle: {name} must be {least} or more, not {getattr(self, name)}.")
        for name, words in (("label", ("mean", "max")), ("shares", ("head", "layer", "model"))):
            if getattr(self, name) not in words:
                raise UserError(f"oracle: {name} is {', '.join(words)}, not {getattr(self, name)!r}.")


class Oracle(Policy):
    """A yardstick of ours: the future attention that KVpop's scorer is trained to guess, known from a dense run.

    With p_{u→t} the dense run's attention from query u to token t in one query head, of a text of S tokens: label=mean
    is m_t = Σ_{u ≥ t+window} p_{u→t} / max(1, S - t - window), label=max is m_t = max_{u ≥ t+window} p_{u→t}. A KV
    head's label is the largest m_t of its query heads. Where a layer or the model shares one kept set, the KV heads'
    labels are reduced before the logarithm, by their mean (label=mean) or their maximum (label=max). The static
    priority is the logarithm of the label, without decay by age (γ = 1) and without KVpop's ε, which only makes ties.

    The dense run reads what is known of the text: prompt and continuation where the continuation is given (fidelity),
    so that every token has its label. Where an answer is generated, it reads the whole prompt, question included, and
    then its own greedy answer of up to `ahead` tokens, because what an answer copies is looked up while it is written;
    ahead=0 is the prompt alone. The tokens that the run under eviction generates have no label; beyond the window they
    leave oldest first, before any token that has one.

    Not a bound: labels say how much a token is attended to when nothing is evicted, not what its loss costs. The labels
    themselves are knowledge and no state of a cache, and are not counted in its bytes.
    """

    name = "oracle"
    summary = "future attention, known from a dense run over the same text; a yardstick"
    paper = "-"
    Config = Settings
    prefill = "bounded"
    static = True
    foresees = True

    def __init__(self, config: Settings | None = None) -> None:
        super().__init__(config)
        self.shares = self.config.shares

    @property
    def sinks(self) -> int:
        """The first positions, never evicted."""
        return int(self.config.sinks)

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """The last positions, never evicted."""
        return int(self.config.window)

    @property
    def ahead(self) -> int:
        """Tokens of its own answer that the dense run reads too."""
        return int(self.config.ahead)

    def foresee(self, run: DenseRun) -> list[Tensor]:
        """The log-label of every token, `[kv_heads, tokens]` float32 a layer; equal rows where a set is shared."""
        from evictbench.policy.future_attention import future_attention

        labels: list[Tensor] = []

        def watch(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
            config = self.config
            found = future_attention(query, key, window=config.window, scaling=scaling, label=config.label)
            found = found.amax(GROUP_DIM)[0]
            labels.append(found if config.shares == "head" else self._shared(found).expand_as(found))

        run(watch)
        if self.config.shares == "model":
            import torch

            whole = self._shared(torch.stack([label[0].to(labels[0].device) for label in labels]))
            labels = [whole.to(label.device).expand_as(label) for label in labels]
        return [label.float().clamp(min=LEAST_LABEL) for label in labels]

    def _shared(self, labels: Tensor) -> Tensor:
        """One label for all: of log-labels `[several, tokens]` the log of the mean or of the maximum, `[1, tokens]`."""
        if self.config.label == "max":
            return labels.amax(0, keepdim=True)
        return labels.logsumexp(0, keepdim=True) - math.log(labels.shape[0])

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """The priority of each entry."""
        import torch

        return {"priority": SlotTensor(torch.float32)}

    def enter(self, entering: Entering) -> Mapping[str, Tensor]:
        """A label, or the place in the queue of those that have none."""
        import torch

        known = entering.known
        assert known is not None
        queue = UNLABELLED + entering.positions[:, None].float()
        return {"priority": torch.where(known.isnan(), queue, known)}

    def score(self, step: Step) -> Tensor:
        """The priority, `[rows, sets, slots]`."""
        priority = step.state["priority"]
        return priority if self.config.shares == "head" else priority[:, :1]
