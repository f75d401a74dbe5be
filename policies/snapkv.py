"""SnapKV: the last queries of the prompt vote for the entries to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from evictbench.errors import UserError
from evictbench.policy import Granularity, GroupReduction, ModelShape, Phase, Policy, SlotTensor, Step, reduce_group
from evictbench.policy.plot_style import PlotStyle

if TYPE_CHECKING:
    from torch import Tensor

RESELECT_EVERY = 128
"""The most tokens between two selections in decode (R-KV's adaptation); an eighth of the budget if that is less."""


@dataclass(frozen=True)
class Settings:
    """window: last queries, which vote and whose entries are kept. kernel, pool: width and kind of the votes' 1-D
    pooling. group: how the votes of a KV head's query heads are reduced. decode: "reselect", so that the budget holds,
    or "append", as published. shares: who shares a kept set: a KV "head", or, as a control, a "layer" or "model"."""

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "avg"] = "max"
    group: GroupReduction = "mean"
    decode: Literal["reselect", "append"] = "reselect"
    shares: Granularity = "head"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(f"snapkv: window must be 1 or more, not {self.window}.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"snapkv: kernel must be odd and 1 or more, not {self.kernel}.")
        for name, allowed in (
            ("pool", ("max", "avg")),
            ("group", ("mean", "max", "sum")),
            ("decode", ("reselect", "append")),
            ("shares", ("head", "layer", "model")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"snapkv: {name} is {', '.join(allowed)}, not {getattr(self, name)!r}.")


class SnapKV(Policy):
    """Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469, section 4.

    Votes are the softmax rows of the last `window` queries over all held keys, summed over the window, reduced over the
    group and pooled along positions. The best prefix entries are kept, and the window itself.

    Deviations: selection per KV head with a named group reduction (the authors select and store per query head);
    decode="reselect", which the paper does not have: whenever the budget is reached, the last `window` queries select
    again and i = min(128, budget // 8) slots are freed. The window's queries that this needs are charged.

    shares=layer and shares=model are controls and not the published method. They compare with methods that keep one set
    for a layer or for the model: the votes of all KV heads that share the set, each reduced over its group, are added
    and then pooled.
    """

    name = "snapkv"
    summary = "the last queries of the prompt vote, pooled along positions"
    paper = "arXiv 2404.14469"
    plot_style = PlotStyle("#2c27fb", "D", place=6)
    Config = Settings
    signals = frozenset({"window_probs"})

    def __init__(self, config: Settings | None = None) -> None:
        super().__init__(config)
        self.granularity = self.config.shares

    @property
    def window(self) -> int:
        """How many last queries vote."""
        return int(self.config.window)

    @property
    def enforces_budget(self) -> bool:
        """Whether the budget holds in decode; decode=append lets the cache grow, as published."""
        return bool(self.config.decode == "reselect")

    def keep(self, budget: int, phase: Phase) -> int | None:
        """Entries that a cut keeps: the budget less an interval; with append the budget in the prompt, later None."""
        if self.config.decode == "append":
            return budget if phase == "prompt" else None
        return budget - max(1, min(RESELECT_EVERY, budget // 8))

    def minimum_budget(self, shape: ModelShape) -> int:
        """Room for the window, the ring, one entry to choose, and the interval that a cut frees."""
        slots = self.window + 2
        while (kept := self.keep(slots, "prompt")) is not None and kept <= self.window:
            slots += 1
        return self.charge(shape).cost(slots)

    def shared_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """`votes`, the sum over the layers so far, where the model shares one kept set."""
        import torch

        return {"votes": SlotTensor(torch.float32)} if self.granularity == "model" else {}

    def observe(self, step: Step) -> None:
        """Add this layer's votes to the sum, where the model shares one kept set."""
        if self.granularity == "model" and step.cuts:
            total = step.shared["votes"]
            if step.layer == 0:
                total.zero_()
            total.add_(self._votes(step).sum(1, keepdim=True).to(total.device))

    def _votes(self, step: Step) -> Tensor:
        """The layer's votes for each entry, `[rows, kv_heads, slots]`."""
        assert step.signals.window_probs is not None
        return reduce_group(step.signals.window_probs().sum(-2), self.config.group)

    def score(self, step: Step) -> Tensor:
        """The pooled votes, `[rows, sets, slots]`; the window's entries are above all others."""
        import torch
        import torch.nn.functional as F

        if self.granularity == "model":
            votes = step.shared["votes"].to(step.positions.device)
        else:
            votes = self._votes(step)
            if self.granularity == "layer":
                votes = votes.sum(1, keepdim=True)
        positions = step.positions.expand_as(votes)
        following = step.query_positions[:, -1, None, None] + 1
        in_window = positions >= following - self.window
        # Pooling runs along positions, over prefix entries only: order them first, the rest behind.
        behind = positions.masked_fill(in_window | (positions < 0), torch.iinfo(torch.int32).max)
        order = behind.argsort(dim=-1, stable=True)
        prefix = ~(in_window | (positions < 0)).gather(-1, order)
        ordered = votes.gather(-1, order)
        pad = self.config.kernel // 2
        if self.config.pool == "max":
            pooled = F.max_pool1d(ordered.masked_fill(~prefix, -torch.inf), self.config.kernel, 1, pad)
        else:
            pooled = F.avg_pool1d(ordered.masked_fill(~prefix, 0.0), self.config.kernel, 1, pad)
        score = torch.empty_like(votes).scatter_(-1, order, pooled)
        # Positions break the tie inside the window: where it does not fit, the most recent stay.
        return torch.where(in_window, 1e6 + (positions - following).float(), score)
