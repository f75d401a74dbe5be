"""When entries leave a pool whose ranking changes as the query moves: one in, one out, exactly.

A head's pool has a fixed number of places. At query q the token at q - window leaves the recent window and joins; if
that is one too many, the entry that is worth least to q leaves, the later of equals, and never returns. Worth falls
with distance at a rate of each entry's own, so that ranks cross.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from evictbench.cache.paged.pool import NEVER
from evictbench.policy.deadlines import static_deadlines

from .scorer import effective

BLOCK = 64
"""Queries that are decided together."""


def deadlines(
    score: Tensor,
    rate: Tensor,
    positions: Tensor,
    *,
    first: int,
    new: int,
    places: int,
    sinks: int,
    window: int,
    how: Literal["exact", "chunk_middle"] = "exact",
) -> Tensor:
    """The first query position that may not see each entry, NEVER where that is beyond first + new: `[heads, slots]`
    int32.

    score, rate, positions: `[heads, slots]`, what the query at `first` - 1 saw, and the `new` entries from `first` on.
    chunk_middle: ranks are those of one query in the middle of the chunk, as in the authors' code for masked prompts.
    """
    begin, end = max(first + 1, places + window + sinks), first + new + 1
    if begin >= end:
        return torch.full_like(positions, NEVER)
    if how == "chunk_middle":
        worth = effective(score, rate, first + new // 2 - positions)
        found = _static(worth, positions, first, new, places, sinks, window)
        return found.clamp(max=NEVER).to(torch.int32)
    died = torch.full_like(positions, NEVER)
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        index = _within_reach(score, rate, positions, died, start, stop, places, sinks, window)
        part = score.gather(1, index), rate.gather(1, index), positions.gather(1, index)
        found = _one_by_one(*part, start, stop, window)
        died.scatter_(1, index, found)
    return died


def _within_reach(
    score: Tensor,
    rate: Tensor,
    positions: Tensor,
    died: Tensor,
    start: int,
    stop: int,
    places: int,
    sinks: int,
    window: int,
) -> Tensor:
    """The entries that may leave at the queries from start to stop - 1: `[heads, some]`, the newcomers included.

    An entry whose worth stays above the n-th lowest of what others are worth at most does not leave within n queries:
    one of those n is still there, and lower. Worth is monotonous in distance, in floating point too.
    """
    count = stop - start
    in_pool = (positions >= sinks) & (positions < start - window) & (died == NEVER)
    coming = (positions >= max(sinks, start - window)) & (positions < stop - window)
    ends = torch.stack([effective(score, rate, query - positions) for query in (start, stop - 1)])
    low, high = ends.amin(0), ends.amax(0)
    reach = in_pool
    if places > count:
        bound = high.masked_fill(~in_pool, torch.inf).topk(count, largest=False).values.amax(-1, keepdim=True)
        reach = in_pool & (low <= bound)
    wanted = int(reach.sum(-1).max()) + count
    order = low.masked_fill(~in_pool, torch.inf).masked_fill(coming, -torch.inf)
    return order.topk(wanted, largest=False).indices


def _one_by_one(score: Tensor, rate: Tensor, positions: Tensor, start: int, stop: int, window: int) -> Tensor:
    """Which entry leaves at each query from start to stop - 1, each query one: the query, or NEVER. `[heads, some]`.

    Guessed from ranks that do not change, then put right: if all that left before a query is right, then so is what
    leaves at it by looking. Each round puts at least one more query right, and what stays the same is right.
    """
    count, some = stop - start, positions.shape[1]
    middle = effective(score, rate, (start + stop) // 2 - positions)
    died = _static(middle, positions, start - 1, count, some - count, 0, window)
    queries = torch.arange(start, stop, dtype=torch.int32, device=positions.device)
    age = queries[:, None] - positions[:, None]
    worth = effective(score[:, None], rate[:, None], age).masked_fill_(age < window, torch.inf)
    at = queries.long().expand(positions.shape[0], -1)
    while True:
        there = worth.masked_fill(died[:, None] < queries[:, None], torch.inf)
        least = there == there.amin(-1, keepdim=True)
        leaves = positions[:, None].masked_fill(~least, -1).argmax(-1)
        found = torch.full_like(died, NEVER).scatter_reduce_(1, leaves, at, "amin")
        if torch.equal(found, died):
            return found.to(torch.int32)
        died = found


def _static(worth: Tensor, positions: Tensor, first: int, new: int, places: int, sinks: int, window: int) -> Tensor:
    """Deadlines if what entries are worth did not change: `[heads, slots]` int64."""
    heads = positions.shape[0]
    queries = torch.arange(first, first + new, device=positions.device).expand(heads, -1)
    budgets = torch.full((heads, new + 1), places + sinks + window, device=positions.device)
    found = static_deadlines(
        worth[:, None], positions[:, None], queries, budgets, sinks=sinks, recent=window, steady=True
    )
    return found[:, 0].clamp(max=NEVER)
