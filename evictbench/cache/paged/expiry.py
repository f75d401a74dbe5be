"""Entries that expire: each has the first query position that may not see it, decided when it enters or a token later.

What no later query sees gives its place to new entries, in decode slot by slot, after a chunk by moving entries up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.clock import ATTENTION, POLICY, SIGNALS
from evictbench.cache.paged.attention import attend_chunk, attend_one
from evictbench.cache.paged.stack import Board
from evictbench.policy.step import Arriving

if TYPE_CHECKING:
    from evictbench.cache.forward_plan import Pass
    from evictbench.cache.paged.cache import PagedCache, PagedLayer
    from evictbench.cache.paged.pool import PagePool


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


@dataclass
class Opened:
    """A pass on one device. positions: of the new entries, `[owners]` int32; before: the numbers of the entries that
    were written last before it, `[layers, owners]`. By layer: slots of the new entries, `[owners]`; bias as of
    `attend_one`, where that is made; reads."""

    board: Board
    positions: Tensor
    before: Tensor
    slots: dict[int, Tensor]
    bias: dict[int, Tensor]
    reads: dict[int, Tensor | None] = field(default_factory=dict)


class Late:
    """What a PagedCache does for such a policy where each row decodes a token."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self._opened: dict[torch.device, Opened] = {}

    def open(self, step: Pass, like: Tensor) -> None:
        """Before the first layer: let all layers' new entries in. like: keys."""
        self._opened = {}
        for device, pools in self.cache.pools().items():
            board, positions = self.cache.boards.of(pools.values()), self.cache.by_owner(step, device)
            before = board.newest(positions.shape[0])
            slots, _ = board.enter(positions.shape[0], positions)
            bias: dict[int, Tensor] = {}
            if device.type != "cuda":
                bias = dict(zip(pools, board.bias(positions, self.cache.shape.group, like.dtype), strict=True))
            of_layers = dict(zip(pools, slots.unbind(), strict=True))
            self._opened[device] = Opened(board, positions, before, of_layers, bias)

    def attend(
        self, layer: PagedLayer, step: Pass, query: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> Tensor:
        """One layer's attention, and after the last what follows for all; the output like query."""
        cache, opened, pool, index = self.cache, self._opened[keys.device], layer.pool, layer.index
        assert pool is not None
        opened.reads[index] = cache.take_read(index, keys.device)
        for name, entry in (("keys", keys), ("values", values)):
            pool.buffers[name].flatten(0, 1).index_copy_(0, opened.slots[index], entry.flatten(0, 2))
        query, clock = cache.policy.after_rotation(query), cache.clock
        if clock is not None:
            clock.lap(POLICY, query.device)
        output = attend_one(pool, query, opened.positions, scaling, opened.bias.get(index))
        if clock is not None:
            clock.lap(ATTENTION, query.device)
        if index == cache.shape.layers - 1:
            self._close(step)
        return output

    def _close(self, step: Pass) -> None:
        for device, opened in self._opened.items():
            numbers, deadlines = opened.before, self._deadlines(step, device, opened)
            if not all(self.cache.seen):  # before this token a row may have had none
                rows = [row for row, seen in enumerate(self.cache.seen) if seen]
                held = torch.tensor([owner for row in rows for owner in self.cache.owners(row)], device=device)
                numbers, deadlines = numbers[:, held], deadlines[:, held]
            opened.board.slots["deadlines"].view(-1).index_copy_(0, numbers.flatten(), deadlines.flatten())
            opened.board.look_ahead(opened.positions + 1)
        self._opened = {}

    def _deadlines(self, step: Pass, device: torch.device, opened: Opened) -> Tensor:
        """Of the entries before the new ones, `[layers, owners]` int32."""
        cache, policy = self.cache, self.cache.policy
        reads = [read for read in opened.reads.values() if read is not None]
        together: list[Tensor] | list[None] = [None] * len(opened.reads)
        if reads:
            if cache.clock is not None:
                cache.clock.lap(POLICY, device)
            (name,) = policy.taps
            together = list(policy.read_together(list(opened.reads), name, reads).unbind())
            if cache.clock is not None:
                cache.clock.lap(SIGNALS, device)
        positions, allotted = step.query_positions(device), cache.allotments(step, device)
        arriving = [
            Arriving(layer, cache.shape, positions, allotted, read)
            for layer, read in zip(opened.reads, together, strict=True)
        ]
        return policy.expiry_together(arriving)[..., 0].flatten(1).to(torch.int32)
