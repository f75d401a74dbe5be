"""Decode of a policy that decides late (`Policy.decides_late`): what a pass says of entries matters to the next only.

So one operation serves all layers of a device: before the first layer it finds the slots of the new entries and what
their queries see, after the last it reads, decides, and looks ahead. In between a layer writes its key and value and
attends. What is kept is what `paged_expiry` keeps layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.clock import ATTENTION, POLICY, SIGNALS
from evictbench.paged_attention import attend_one
from evictbench.paged_board import Board
from evictbench.policy import Arriving

if TYPE_CHECKING:
    from evictbench.paged import PagedCache, PagedLayer
    from evictbench.passes import Pass


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
