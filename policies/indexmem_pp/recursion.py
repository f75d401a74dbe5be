"""The exact expiry of entries in a pool whose ranking changes from query to query.

A head's pool has a fixed capacity. At query q the token at q - window leaves the recent window and joins the pool. If
the pool is then too full, the entry with the lowest score at q is evicted, of equals the later one, and never returns.
Each entry's score falls with distance at a rate of its own, so that ranks cross.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from evictbench.policy import NEVER
from evictbench.policy.expiry import static_expiry

from .scorer import effective

BLOCK = 64
"""How many queries are decided together."""


def expiry(
    score: Tensor,
    rate: Tensor,
    positions: Tensor,
    *,
    first: int,
    new: int,
    capacity: int | Tensor,
    sinks: int,
    window: int,
    how: Literal["exact", "middle"] = "exact",
) -> Tensor:
    """The first query position that may not see each entry, NEVER where that is beyond first + new: `[heads, slots]`
    int32.

    score, rate, positions: `[heads, slots]`, of the entries that the query at `first` - 1 saw, and of the `new` ones
    from `first` on. capacity: of the pool, of all heads or `[heads]`. sinks, window: protected positions. how: "exact",
    or "middle", which takes the ranks at one query in the middle of the new ones.
    """
    if how == "middle":
        middle = effective(score, rate, first + new // 2 - positions)
        return _static(middle, positions, first, new, capacity, sinks, window).clamp(max=NEVER).to(torch.int32)
    if isinstance(capacity, Tensor):
        by_head = [
            expiry(
                score[[head]],
                rate[[head]],
                positions[[head]],
                first=first,
                new=new,
                capacity=own,
                sinks=sinks,
                window=window,
            )
            for head, own in enumerate(capacity.tolist())
        ]
        return torch.cat(by_head)
    begin, end = max(first + 1, capacity + window + sinks), first + new + 1
    if begin >= end:
        return torch.full_like(positions, NEVER)
    expires = torch.full_like(positions, NEVER)
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        index = _candidates(score, rate, positions, expires, start, stop, capacity, sinks, window)
        part = score.gather(1, index), rate.gather(1, index), positions.gather(1, index)
        expires.scatter_(1, index, _query_by_query(*part, start, stop, window))
    return expires


def _candidates(
    score: Tensor,
    rate: Tensor,
    positions: Tensor,
    expires: Tensor,
    start: int,
    stop: int,
    capacity: int,
    sinks: int,
    window: int,
) -> Tensor:
    """The slots of entries, newcomers included, that the queries from start to stop - 1 may evict, `[heads, some]`.

    An entry is not evicted within n queries if its lowest score is above the n-th lowest of all entries' highest
    scores: one of those n is still there, and lower. Scores are monotonous in distance, in floating point too.
    """
    count = stop - start
    in_pool = (positions >= sinks) & (positions < start - window) & (expires == NEVER)
    newcomers = (positions >= max(sinks, start - window)) & (positions < stop - window)
    ends = torch.stack([effective(score, rate, query - positions) for query in (start, stop - 1)])
    low, high = ends.amin(0), ends.amax(0)
    candidates = in_pool
    if capacity > count:
        bound = high.masked_fill(~in_pool, torch.inf).topk(count, largest=False).values.amax(-1, keepdim=True)
        candidates = in_pool & (low <= bound)
    some = int(candidates.sum(-1).max()) + count
    order = low.masked_fill(~in_pool, torch.inf).masked_fill(newcomers, -torch.inf)
    return order.topk(some, largest=False).indices


def _query_by_query(score: Tensor, rate: Tensor, positions: Tensor, start: int, stop: int, window: int) -> Tensor:
    """The query from start to stop - 1 at which each entry is evicted, or NEVER, `[heads, some]`; one entry a query.

    A first guess with fixed ranks is corrected in rounds. If all evictions before a query are right, so is
    the one that a round computes at it; each round corrects at least one more query, and the fixed point is right.
    """
    count, some = stop - start, positions.shape[1]
    middle = effective(score, rate, (start + stop) // 2 - positions)
    expires = _static(middle, positions, start - 1, count, some - count, 0, window)
    queries = torch.arange(start, stop, dtype=torch.int32, device=positions.device)
    age = queries[:, None] - positions[:, None]
    scores = effective(score[:, None], rate[:, None], age).masked_fill_(age < window, torch.inf)
    query_of_each = queries.expand(positions.shape[0], -1)
    while True:
        held = scores.masked_fill(expires[:, None] < queries[:, None], torch.inf)
        lowest = held == held.amin(-1, keepdim=True)
        evicted = positions[:, None].masked_fill(~lowest, -1).argmax(-1)
        corrected = torch.full_like(expires, NEVER).scatter_reduce_(1, evicted, query_of_each, "amin")
        if torch.equal(corrected, expires):
            return corrected
        expires = corrected


def _static(
    score: Tensor, positions: Tensor, first: int, new: int, capacity: int | Tensor, sinks: int, window: int
) -> Tensor:
    """The expiry if scores `[heads, slots]` did not change from query to query, `[heads, slots]` int32."""
    heads = positions.shape[0]
    queries = torch.arange(first, first + new, device=positions.device).expand(heads, -1)
    budgets = torch.as_tensor(capacity + sinks + window, device=positions.device).expand(heads)[:, None]
    budgets = budgets.expand(-1, new + 1)
    slots = positions[:, None]
    expires = static_expiry(score[:, None], slots, queries, budgets, sinks=sinks, recent=window, steady=True)
    return expires[:, 0].clamp(max=NEVER)
