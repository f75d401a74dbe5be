"""SnapKV: the last queries of the prompt vote for the entries to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from evictbench.errors import UserError
from evictbench.policy import (
    Granularity,
    GroupReduction,
    ModelShape,
    Phase,
    Policy,
    Signal,
    SlotTensor,
    Step,
    reduce_group,
)
from evictbench.policy.plot_style import PlotStyle

if TYPE_CHECKING:
    from torch import Tensor

RESELECT_EVERY = 128
"""With votes=window, the most tokens between two selections in decode; an eighth of the budget if that is less."""

PART = 64
"""Queries of a question whose probabilities are held at once."""


@dataclass(frozen=True)
class Settings:
    """window: last queries, which vote and whose entries are kept. kernel, pool: width and kind of the votes' 1-D
    pooling. group: how the votes of a KV head's query heads are reduced. decode: "append", as published, or "reselect",
    so that the budget holds in a long answer. votes: with reselect, how the window goes on in decode: as "running" sums
    or as a "window" of queries that are held. shares: who shares a kept set: a KV "head", or, as a control, a "layer"
    or "model"."""

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "avg"] = "max"
    group: GroupReduction = "mean"
    decode: Literal["append", "reselect"] = "append"
    votes: Literal["running", "window"] = "running"
    shares: Granularity = "head"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(f"snapkv: window must be 1 or more, not {self.window}.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"snapkv: kernel must be odd and 1 or more, not {self.kernel}.")
        for name, allowed in (
            ("pool", ("max", "avg")),
            ("group", ("mean", "max", "sum")),
            ("decode", ("append", "reselect")),
            ("votes", ("running", "window")),
            ("shares", ("head", "layer", "model")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"snapkv: {name} is {', '.join(allowed)}, not {getattr(self, name)!r}.")
        if self.decode == "append" and self.votes != "running":
            raise UserError("snapkv: votes=window is for decode=reselect; decode=append never selects again.")


class SnapKV(Policy):
    """Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469, section 4.

    Votes are the softmax rows of the last `window` queries over all held keys, summed over the window, reduced over the
    group and pooled along positions. The best prefix entries are kept, and the window itself.

    decode=append is the published method, and the default, because a row that bears a paper's name should be what the
    paper ran: the prompt is cut to the budget, and every token of the answer is appended. Nothing bounds the cache in
    decode, so the budget is not enforced, and a row stands at the entries that its queries saw.

    decode=reselect is ours, for long answers, and keeps to the budget at every step. With votes=running the prompt is
    cut by the same votes to one entry less than the budget. Then each new query adds its own softmax row to the votes,
    all earlier votes having lost 1/window of themselves, and the entry outside the last `window` positions with the
    fewest votes leaves. These votes are not pooled: what is held no longer stands side by side. One number is held with
    each entry. With votes=window, the earlier way, the last `window` queries are held and charged (48 entries on
    SmolLM2 135M), and whenever the budget is reached they select again, pooled, and min(128, budget // 8) slots are
    freed.

    Deviations: selection per KV head with a named group reduction (the authors select and store per query head).

    shares=layer and shares=model are controls and not the published method. They compare with methods that keep one set
    for a layer or for the model: the votes of all KV heads that share the set, each reduced over its group, are added
    and then pooled.
    """

    name = "snapkv"
    summary = "the last queries of the prompt vote, pooled along positions; the answer is appended"
    paper = "arXiv 2404.14469"
    plot_style = PlotStyle("#2c27fb", "D", place=6)
    Config = Settings

    def __init__(self, config: Settings | None = None) -> None:
        super().__init__(config)
        self.granularity = self.config.shares
        self._running = self.config.decode == "reselect" and self.config.votes == "running"

    @property
    def signals(self) -> frozenset[Signal]:  # type: ignore[override]
        """The window's probabilities; with running votes also those of each query of the answer."""
        return frozenset({"window_probs", "recent_probs"} if self._running else {"window_probs"})

    @classmethod
    def named_settings(cls, recorded: Mapping[str, Any]) -> Mapping[str, Any]:
        """Results without `votes` held the window's queries, where they selected again."""
        held = recorded.get("decode") == "reselect"
        return {"votes": "window" if held else "running", **recorded}

    @property
    def window(self) -> int:
        """How many last queries vote."""
        return int(self.config.window)

    @property
    def window_in_decode(self) -> bool:
        """Whether the window's queries are held in decode, to select again."""
        return self.enforces_budget and not self._running

    @property
    def enforces_budget(self) -> bool:
        """Whether the budget holds in decode; decode=append lets the cache grow, as published."""
        return bool(self.config.decode == "reselect")

    def keep(self, budget: int, phase: Phase) -> int | None:
        """Entries that a cut keeps: with append the budget in the prompt and later None; else the budget less one, or
        with votes=window less an interval."""
        if self.config.decode == "append":
            return budget if phase == "prompt" else None
        return budget - (1 if self._running else max(1, min(RESELECT_EVERY, budget // 8)))

    def minimum_budget(self, shape: ModelShape) -> int:
        """Room for the window, what is charged, one entry to choose, and the interval that a cut frees."""
        slots = self.window + 2
        while (kept := self.keep(slots, "prompt")) is not None and kept <= self.window:
            slots += 1
        return self.charge(shape).cost(slots)

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """`votes`, each entry's running votes, where every KV head has its own kept set."""
        import torch

        return {"votes": SlotTensor(torch.float32)} if self._running and self.granularity == "head" else {}

    def shared_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """`votes`, the sum over those who share a kept set: running, or over the layers so far."""
        import torch

        held = self.granularity == "model" or (self._running and self.granularity == "layer")
        return {"votes": SlotTensor(torch.float32)} if held else {}

    def observe(self, step: Step) -> None:
        """Bring running votes up to this pass; else add this layer's votes to the sum of a model's one kept set."""
        if self._running:
            self._update(step)
        elif self.granularity == "model" and step.cuts:
            total = step.shared["votes"]
            if step.layer == 0:
                total.zero_()
            total.add_(self._votes(step).sum(1, keepdim=True).to(total.device))

    def _update(self, step: Step) -> None:
        """Replace the running votes by the window's while a prompt is read, and later add each query's row."""
        remaining: Tensor | float
        if step.signals.window_probs is None:
            votes, remaining = self._later_votes(step)
        elif step.cuts or step.ends_prompt:
            votes, remaining = self._votes(step), 0.0
        else:
            return
        if self.granularity == "head":
            total = step.state["votes"]
        else:
            total = step.shared["votes"]
            votes = votes.sum(1, keepdim=True).to(total.device)
            if self.granularity == "model" and step.layer > 0:  # the first layer has made all layers' votes fade
                remaining = 1.0
        total.mul_(remaining if isinstance(remaining, float) else remaining.to(total.device)).add_(votes)

    def _later_votes(self, step: Step) -> tuple[Tensor, Tensor | float]:
        """The votes of a pass behind the prompt, `[rows, kv_heads, slots]`, faded to its end, and what is left of
        earlier ones: a factor for all rows, or `[rows, 1, 1]`."""
        import torch

        recent_probs, left = step.signals.recent_probs, 1 - 1 / self.window
        assert recent_probs is not None
        queries = step.query_positions.shape[1]
        if queries == 1:
            return reduce_group(recent_probs(1)[:, :, :, 0], self.config.group), left
        votes: Tensor | None = None
        for before in range(0, queries, PART):
            count = min(PART, queries - before)
            rows = reduce_group(recent_probs(count, before), self.config.group)
            ages = torch.arange(before + count - 1, before - 1, -1, device=rows.device)
            part = (rows * torch.pow(left, ages)[:, None]).sum(-2)
            votes = part if votes is None else votes + part
        assert votes is not None
        tokens = (step.query_positions >= 0).sum(-1)
        return votes, torch.pow(left, tokens)[:, None, None]

    def _votes(self, step: Step) -> Tensor:
        """The layer's votes for each entry, `[rows, kv_heads, slots]`."""
        assert step.signals.window_probs is not None
        return reduce_group(step.signals.window_probs().sum(-2), self.config.group)

    def score(self, step: Step) -> Tensor:
        """The votes, `[rows, sets, slots]`, pooled; the window's entries are above all others."""
        import torch
        import torch.nn.functional as F

        if self.granularity == "model" or (self._running and self.granularity == "layer"):
            votes = step.shared["votes"].to(step.positions.device)
        elif self._running:
            votes = step.state["votes"]
        else:
            votes = self._votes(step)
            if self.granularity == "layer":
                votes = votes.sum(1, keepdim=True)
        positions = step.positions.expand_as(votes)
        following = step.query_positions[:, -1, None, None] + 1
        in_window = positions >= following - self.window
        if step.signals.window_probs is None:  # running votes, behind the prompt
            return torch.where(in_window, 1e6 + (positions - following).float(), votes)
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
