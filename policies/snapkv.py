"""SnapKV: the last queries of the prompt vote for what to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from evictbench.errors import UserError
from evictbench.policy import GroupReduction, ModelShape, Phase, Policy, Shares, SlotTensor, Step, reduce_group

if TYPE_CHECKING:
    from torch import Tensor

RESELECT_EVERY = 128
"""In decode, tokens between two selections, where an eighth of the budget is not less (R-KV's adaptation)."""


@dataclass(frozen=True)
class Settings:
    """window: last queries, which vote and are kept; kernel and pool: 1-D pooling of the votes; group: reduction of
    a KV head's query heads; decode: "reselect" so that the budget holds, or "append" as published. shares: each KV
    "head" has its own kept set; one for a "layer" or the "model" is a control."""

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "avg"] = "max"
    group: GroupReduction = "mean"
    decode: Literal["reselect", "append"] = "reselect"
    shares: Shares = "head"

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

    Votes: softmax rows of the last `window` queries over all held keys, summed over the window, reduced over the
    group, pooled along positions; the best prefix entries are kept with the window itself.

    Deviations: selection per KV head with a named group reduction (the authors select and store per query head);
    decode="reselect", which the paper does not have: whenever the budget is reached, the last `window` queries select
    again and i = min(128, budget // 8) places are freed. The ring of window queries that this needs is charged.

    shares=layer and shares=model are not the published method but controls, for comparison with methods that keep one
    set for a layer or for the model: the votes of all KV heads that share the set, each reduced over its group, are
    added up and then pooled.
    """

    name = "snapkv"
    summary = "the last queries of the prompt vote, pooled along positions"
    paper = "arXiv 2404.14469"
    Config = Settings
    signals = frozenset({"window_probs"})

    def __init__(self, config: Settings | None = None) -> None:
        super().__init__(config)
        self.shares = self.config.shares

    @property
    def window(self) -> int:
        """The queries that vote."""
        return int(self.config.window)

    @property
    def guarded(self) -> bool:
        """decode=append lets the cache grow, as published."""
        return bool(self.config.decode == "reselect")

    def keep(self, budget: int, phase: Phase) -> int | None:
        """A whole interval is freed at once; append cuts the prompt to the budget and nothing afterwards."""
        if self.config.decode == "append":
            return budget if phase == "prompt" else None
        return budget - max(1, min(RESELECT_EVERY, budget // 8))

    def charged_state(self, shape: ModelShape) -> int:
        """The ring: heads · window · head_dim elements a layer, over 2 · head_dim · kv_heads."""
        return -(-shape.group * self.window // 2) if self.guarded else 0

    def minimum_budget(self, shape: ModelShape) -> int:
        """The window, the ring, one place to choose, and the interval that is freed."""
        slots = self.window + 2
        while (kept := self.keep(slots, "prompt")) is not None and kept <= self.window:
            slots += 1
        return slots + self.charged_state(shape)

    def shared_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """The votes of the layers so far, where the model shares one kept set."""
        import torch

        return {"votes": SlotTensor(torch.float32)} if self.shares == "model" else {}

    def observe(self, step: Step) -> None:
        """Where the model shares one kept set, a layer votes once it has attended."""
        if self.shares == "model" and step.cuts:
            total = step.shared["votes"]
            if step.layer == 0:
                total.zero_()
            total.add_(self._votes(step).sum(1, keepdim=True).to(total.device))

    def _votes(self, step: Step) -> Tensor:
        """`[rows, kv_heads, slots]`."""
        assert step.signals.window_probs is not None
        return reduce_group(step.signals.window_probs().sum(-2), self.config.group)

    def score(self, step: Step) -> Tensor:
        """Pooled votes; the window itself above everything. `[rows, sets, slots]`."""
        import torch
        import torch.nn.functional as F

        if self.shares == "model":
            votes = step.shared["votes"].to(step.positions.device)
        else:
            votes = self._votes(step)
            if self.shares == "layer":
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
