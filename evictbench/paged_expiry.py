"""Entries that expire: each has the first query position that may not see it, decided when it enters or a token later.

What no later query sees gives its place to new entries, in decode slot by slot, after a chunk by moving entries up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.clock import ATTENTION, POLICY
from evictbench.paged_attention import attend_chunk, attend_one
from evictbench.policy import Arriving

if TYPE_CHECKING:
    from evictbench.paged import PagedCache, PagedLayer
    from evictbench.pages import PagePool
    from evictbench.passes import Pass


def expire(
    cache: PagedCache, layer: PagedLayer, step: Pass, query: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> Tensor:
    """One layer's attention and what follows from it; the output like query, `[rows, heads, queries, head_dim]`."""
    if layer.pool is None:
        layer.pool = cache.new_pool(max(cache.row_capacity or 0, step.rows), keys)
    deadlines = _deadlines(cache, layer, step, keys.device)
    _decide_newest(cache, layer.pool, step, deadlines[:, :, 0])
    query = cache.policy.after_rotation(query)
    attend = _attend_in_place if cache.in_place(step) else _attend_chunk
    return attend(cache, layer.pool, step, query, keys, values, deadlines[:, :, 1:], scaling)


def _deadlines(cache: PagedCache, layer: PagedLayer, step: Pass, device: torch.device) -> Tensor:
    """`[rows, kv_heads, 1 + queries]` int32: of the entry before the new ones, and of the new ones."""
    arriving = Arriving(
        layer=layer.index,
        shape=cache.shape,
        positions=step.query_positions(device),
        allotted=cache.allotments(step, device),
        read=cache.take_read(layer.index, device),
    )
    return cache.policy.expiry(arriving).to(torch.int32)


def _decide_newest(cache: PagedCache, pool: PagePool, step: Pass, deadlines: Tensor) -> None:
    """Write what this pass says of each row's last entry before it."""
    rows = [row for row, (count, seen) in enumerate(zip(step.counts, cache.seen, strict=True)) if count and seen]
    if len(rows) == step.rows:
        pool.set_newest(slice(0, deadlines.numel()), deadlines.flatten())
    elif rows:
        owners = torch.tensor([owner for row in rows for owner in cache.owners(row)], device=pool.device)
        pool.set_newest(owners, deadlines[torch.tensor(rows, device=pool.device)].flatten())


def _attend_in_place(
    cache: PagedCache,
    pool: PagePool,
    step: Pass,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    deadlines: Tensor,
    scaling: float,
) -> Tensor:
    def following() -> Tensor:
        after = positions.new_zeros(pool.length.shape[0])
        after[: positions.shape[0]] = positions + 1
        return after

    positions = cache.by_owner(step, keys.device)
    entries = {
        "keys": keys.flatten(0, 2),
        "values": values.flatten(0, 2),
        "positions": positions,
        "deadlines": deadlines.flatten(),
    }
    pool.put(positions.shape[0], entries)
    if cache.clock is not None:
        cache.clock.lap(POLICY, query.device)
    output = attend_one(pool, query, positions, scaling)
    if cache.clock is not None:
        cache.clock.lap(ATTENTION, query.device)
    pool.look_ahead(step.once("following_by_owner", keys.device, following))
    return output


def _attend_chunk(
    cache: PagedCache,
    pool: PagePool,
    step: Pass,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    deadlines: Tensor,
    scaling: float,
) -> Tensor:
    output = torch.zeros_like(query)
    positions = step.query_positions(keys.device)
    for row, count in enumerate(step.counts):
        if count == 0:
            continue
        new = slice(step.queries - count, step.queries)
        entries = {
            "keys": keys[row, :, new],
            "values": values[row, :, new],
            "positions": positions[row, new].expand(cache.shape.kv_heads, -1),
            "deadlines": deadlines[row, :, new],
        }
        first = cache.owners(row).start
        if cache.clock is not None:
            cache.clock.lap(POLICY, query.device)
        output[row, :, new] = attend_chunk(pool, first, query[row, :, new], entries, scaling)
        if cache.clock is not None:
            cache.clock.lap(ATTENTION, query.device)
        pool.settle(first, entries, step.seen[row])
    return output
