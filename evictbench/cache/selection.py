"""Which entries of a kept set are the best or the worst, by score and then by position."""

from __future__ import annotations

import torch
from torch import Tensor

from evictbench.policy.expiry import rank_by_score
from evictbench.policy.step import EMPTY


def worst(score: Tensor, positions: Tensor, protected: Tensor | None) -> Tensor:
    """The slot with the lowest score, the latest position among equals: `[rows, sets]` int64."""
    if protected is not None:
        score = score.masked_fill(protected, _limits(score)[1])
    lowest = score.amin(-1, keepdim=True)
    return positions.masked_fill(score > lowest, EMPTY).argmax(-1)


def best(score: Tensor, positions: Tensor, protected: Tensor | None, target: int) -> Tensor:
    """The `target` best slots in slot order, `[rows, sets, target]` int64; empty slots come last."""
    low, high = _limits(score)
    score = score.expand(positions.shape)
    if protected is not None:
        score = score.masked_fill(protected, high)
    score = score.masked_fill(positions < 0, low)
    rank = rank_by_score(score, positions.masked_fill(positions < 0, torch.iinfo(torch.int32).max))
    return in_slot_order(rank < target, target)


def in_slot_order(keep: Tensor, target: int) -> Tensor:
    """The indices of the true entries of the last dimension, ascending, the first `target` of them."""
    return (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[..., :target]


def _limits(score: Tensor) -> tuple[float, float]:
    if score.is_floating_point():
        return -torch.inf, torch.inf
    limits = torch.iinfo(score.dtype)
    return limits.min, limits.max
