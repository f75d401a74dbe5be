"""When entries of a chunk expire under static scores: when reading token by token would have evicted each of them.

A pool of `budget - sinks - recent` entries keeps the best of all tokens that have left the recent window; a dropped
token never returns. An entry with r better ones in the pool is evicted when its (pool - r)-th better newcomer arrives,
which is a comparison and a cumulative sum. Where the pool grows inside the chunk (a budget in percent), the
recursion is run as it is defined, one newcomer at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evictbench.policy.step import NEVER
from evictbench.policy.tiles import ELEMENTS_AT_ONCE


def rank_by_score(score: Tensor, positions: Tensor) -> Tensor:
    """0 for the best of the last dimension, by score and then by the earlier position. Both `[.., slots]`; int64."""
    by_position = positions.argsort(dim=-1, stable=True)
    order = score.gather(-1, by_position).argsort(dim=-1, descending=True, stable=True)
    order = by_position.gather(-1, order)
    ranks = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, ranks)


def static_expiry(
    score: Tensor,
    positions: Tensor,
    query_positions: Tensor,
    budgets: Tensor,
    *,
    sinks: int,
    recent: Tensor | int,
    steady: bool,
) -> Tensor:
    """The first query position that may no longer see each entry; NEVER where that lies beyond this chunk.

    score, positions: `[rows, sets, slots]`, stored and new entries alike, position -1 where a slot is empty.
    query_positions: `[rows, queries]`, -1 for (left) padding; budgets: `[rows, queries + 1]`, the last one for the
    query after the chunk. recent: an int, or shaped like budgets; it counts the query's own entry. steady: all
    budgets of a row are equal. Returns int32.
    """
    score = score.expand(positions.shape)
    queries = query_positions.shape[1]
    real = (query_positions >= 0).sum(-1)
    first = query_positions[:, -1].long() + 1 - real
    recent_now = torch.as_tensor(recent, device=budgets.device).clamp(min=1).expand_as(budgets)
    pool_size = budgets - sinks - recent_now

    # The position whose window membership ends at the j-th query counted from the first real one, j = 0..queries.
    steps = torch.arange(queries + 1, device=positions.device)
    column = (steps + (queries - real)[:, None]).clamp(max=queries)
    pool_size = pool_size.gather(1, column)
    last_out = first[:, None] + steps - recent_now.gather(1, column)

    pos = positions.long()
    candidate = pos >= sinks
    # The first j at which an entry is in the pool: the first with last_out >= position.
    entry = torch.searchsorted(
        last_out[:, None].expand(-1, pos.shape[1], -1).contiguous(), pos.contiguous(), right=False
    )
    rank = rank_by_score(score, positions).masked_fill(~candidate, NEVER)
    find = _by_counting if steady else _by_recursion
    died = find(rank, entry.masked_fill(~candidate, queries + 1), pool_size)
    expiry = first[:, None, None] + died
    return expiry.masked_fill(~candidate | (died > queries), NEVER).to(torch.int32)


def _by_counting(rank: Tensor, entry: Tensor, pool_size: Tensor) -> Tensor:
    """Constant pool: the step at which each entry has `pool_size` better ones before it (queries + 1: not here)."""
    rows, sets, slots = rank.shape
    queries = pool_size.shape[1] - 1
    held = entry == 0
    # Rank of the newcomer of step j (j = 1..queries); where none arrives, worse than all.
    arrivals = rank.new_full((rows, sets, queries + 2), NEVER)
    arrivals.scatter_(-1, entry, rank.masked_fill(held, NEVER))
    arrivals = arrivals[..., 1 : queries + 1]
    order = rank.argsort(dim=-1)
    better = held.gather(-1, order).long().cumsum(-1) - held.gather(-1, order).long()
    better_held = torch.empty_like(better).scatter_(-1, order, better)
    needed = pool_size[:, :1, None] - better_held
    died = torch.empty_like(rank)
    tile = max(1, ELEMENTS_AT_ONCE // max(1, rows * sets * queries))
    for start in range(0, slots, tile):
        part = slice(start, start + tile)
        count = (arrivals[:, :, None, :] < rank[:, :, part, None]).cumsum(-1, dtype=torch.int32)
        died[:, :, part] = 1 + (count < needed[:, :, part, None]).sum(-1)
    died = torch.where(needed <= 0, 0, died)
    return torch.maximum(died, entry)


def _by_recursion(rank: Tensor, entry: Tensor, pool_size: Tensor) -> Tensor:
    """Growing pool: at each step the newcomer joins, and the worst leaves if the pool is too small for both."""
    queries = pool_size.shape[1] - 1
    died = torch.full_like(rank, queries + 1)
    alive = entry == 0
    for step in range(1, queries + 1):
        alive = alive | (entry == step)
        leaves = alive.sum(-1, keepdim=True) > pool_size[:, None, step : step + 1]
        worst = rank.masked_fill(~alive, -1).argmax(-1, keepdim=True)
        died.scatter_(-1, worst, torch.where(leaves, step, died.gather(-1, worst)))
        alive = alive.scatter(-1, worst, alive.gather(-1, worst) & ~leaves)
    return died
