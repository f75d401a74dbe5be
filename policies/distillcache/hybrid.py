"""DistillCache's hybrid: some heads see everything, and the others see fewer entries for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from evictbench.errors import UserError
from evictbench.policy import Step

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy import ModelShape
    from evictbench.policy.budget import Budget

ONE_IN = 5
"""One KV head in this many sees everything."""

Number = TypeVar("Number", int, "Tensor")


def check(budget: Budget) -> None:
    """Raise UserError for a budget that leaves the other heads no entry, or that is no share of the text."""
    if budget.share is None or budget.share * ONE_IN <= 1:
        raise UserError(
            "distillcache with heads=hybrid keeps everything in a fifth of the heads, which takes 20% of the text: "
            f"give a budget in percent above that, not {budget}."
        )


def full_heads(shape: ModelShape) -> int:
    """How many KV heads of the model see everything: a fifth, rounded down."""
    return shape.layers * shape.kv_heads // ONE_IN


def entries_for_others(budget: Number, held: Number, shape: ModelShape) -> Number:
    """How many entries the other heads may see, so that the mean over heads is the budget when full heads see `held`;
    all count the query's own. It may be below 1, where budgets are rounded; a query sees itself all the same."""
    heads, full = shape.layers * shape.kv_heads, full_heads(shape)
    return (budget * heads - held * full) // (heads - full)


def visible_entries(held: int, budget: int, shape: ModelShape) -> float:
    """The mean over KV heads of the entries that a query sees. held, budget: entries, the query's own included."""
    heads, full = shape.layers * shape.kv_heads, full_heads(shape)
    others = min(held, max(1, entries_for_others(budget, held, shape)))
    return (full * held + (heads - full) * others) / heads


def hide(step: Step, score: Tensor) -> None:
    """Hide the surplus entries, those with the lowest scores `[rows, slots]`, from the other heads. Where entries are
    hidden for the first time, the heads that attend most to them become full. step: the last layer's.
    """
    import torch

    from evictbench.policy.expiry import rank_by_score

    hidden, full = step.shared["hidden"][:, 0], step.shared["full"][:, 0]
    device = hidden.device
    positions, score = step.positions[:, 0].to(device), score.to(device)
    visible = (positions >= 0) & ~hidden
    held = (positions >= 0).sum(-1) + 1
    keep = (entries_for_others(step.budgets[:, -1].to(device), held, step.shape) - 1).clamp(min=0)
    behind = positions.masked_fill(~visible, torch.iinfo(positions.dtype).max)
    rank = rank_by_score(score.masked_fill(~visible, -torch.inf), behind)
    lost = visible & (rank >= keep[:, None])
    by_head = torch.cat([mass.to(device) for mass in step.carried["by_head"]], dim=1)
    attention = (by_head * lost[:, None]).sum(-1)
    index = torch.arange(attention.shape[1], device=device).expand_as(attention)
    most = rank_by_score(attention, index) < full_heads(step.shape)
    undecided = ~full.any(-1, keepdim=True) & lost.any(-1, keepdim=True)
    full |= most & undecided
    hidden |= lost
