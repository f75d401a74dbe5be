"""The pools of several layers side by side, so that one operation serves all layers of a device.

All tensors but keys and values are stacked: while no page changes hands, a pool's tensors are parts of the stack's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evictbench.cache.paged.attention import expiry_bias
from evictbench.cache.paged.pool import PAGE, PagePool
from evictbench.policy.step import EMPTY, NEVER

BY_OWNER = ("length", "newest", "visible", "tail", "freed_slot")
"""Tensors of a pool that have one number for each owner."""

FEW_PAIRS = 2**15
"""Up to so many pairs of a query and a slot of its pool, one product of all of them takes less time than products page
by page of those that are needed."""


class StackedPools:
    """The pools of one device, which all have equally many owners.

    slots: tensors `[pages of all pools, 16(, width)]` by name. by_owner: tensors `[pools, owners, ...]` by name. owner:
    `[pages]` int64, the owner of each page, counted through all pools. base: `[pools, 1]` int64, the number of each
    pool's first slot.
    Only where the pools have centroids: numbers: `[pages, 16]` int64, of all slots. fronts: `[pools, owners,
    centroids]`, the slots of each owner's centroids in its pool. keys, values: of each pool, `[slots, head_dim]`.
    """

    def __init__(self, pools: Sequence[PagePool]) -> None:
        self.pools = pools
        self.slots: dict[str, Tensor] = {}
        self.by_owner: dict[str, Tensor] = {}
        self._mark = object()
        self._changes: list[int] | None = None
        self._sizes: list[int] = []
        self._parts: dict[str, Sequence[Tensor]] = {}

    def refresh(self) -> None:
        """Stack the pools' tensors again, if pages have changed hands."""
        pools = self.pools
        changes = [pool.changes for pool in pools]
        if self._changes == changes and all(pool.stacked_by is self._mark for pool in pools):
            return
        self._number([pool.pages for pool in pools])
        attributes, buffers = [vars(pool) for pool in pools], [pool.buffers for pool in pools]
        for name in buffers[0]:
            if name not in ("keys", "values"):
                self._join(self.slots, name, buffers, torch.cat)
        self._join(self.slots, "owner", attributes, torch.cat)
        for name in BY_OWNER:
            self._join(self.by_owner, name, attributes, torch.stack)
        for name in pools[0].owner_tensors:
            self._join(self.by_owner, name, [pool.owner_tensors for pool in pools], torch.stack)
        self.owner = self.slots["owner"] + self._first_owner
        if pools[0].owner_tensors:
            self.numbers = torch.arange(self.owner.shape[0] * PAGE, device=self.owner.device).view(-1, PAGE)
            self.fronts = torch.stack([pool.front(pool.owner_tensors["counts"].shape[1]) for pool in pools])
            self.keys, self.values = ([held[name].flatten(0, 1) for held in buffers] for name in ("keys", "values"))
        for pool in pools:
            pool.stacked_by = self._mark  # another stack that had these pools has lost them
        self._changes = changes

    def _number(self, sizes: list[int]) -> None:
        """Compute what follows from the number of pages of each pool."""
        if sizes == self._sizes:
            return
        device, owners, counts = self.pools[0].device, self.pools[0].length.shape[0], torch.tensor(sizes)
        starts = counts.cumsum(0) - counts
        pool = torch.arange(len(sizes)).repeat_interleave(counts)
        self.base = (starts * PAGE)[:, None].to(device)
        self._first_owner = (pool * owners).to(device)
        self._first_slot = ((torch.arange(pool.shape[0]) - starts[pool]) * PAGE).to(device)
        self._sizes = sizes

    def _join(
        self, whole: dict[str, Tensor], name: str, pools: list[dict[str, Any]], how: Callable[..., Tensor]
    ) -> None:
        """Make one tensor of the pools' tensors of a name, and give them its parts, unless they have those already."""
        held = [pool[name] for pool in pools]
        if all(own is part for own, part in zip(held, self._parts.get(name, [None] * len(held)), strict=True)):
            return
        whole[name] = how(held)
        self._parts[name] = whole[name].split(self._sizes) if how is torch.cat else whole[name].unbind()
        for pool, part in zip(pools, self._parts[name], strict=True):
            pool[name] = part

    def wants_page(self, owners: int) -> Tensor:
        """`[2, pools, owners]` int64 for the first owners of each pool: 1 if the next entry needs a new page, and the
        number of entries that its query sees without itself."""
        self.refresh()
        mine = {name: self.by_owner[name][:, :owners] for name in BY_OWNER}
        return torch.stack(((mine["freed_slot"] < 0) & (mine["length"] % PAGE == 0), mine["visible"]))

    def newest(self, owners: int) -> Tensor:
        """The numbers of the slots that the first owners wrote last, `[pools, owners]` int64."""
        self.refresh()
        return self.by_owner["newest"][:, :owners] + self.base

    def append(self, positions: Tensor, owners: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Give the next entry of each owner a slot in every pool, visible from now on: a freed one, or the next one.

        positions: `[owners]` int32, of the entries. owners: int64, who has one; None: the first ones. Who `wants_page`
        must have got one. Returns the slots `[pools, owners]` and their numbers, flat, int64. Positions and expiry are
        written; the caller writes the rest.
        """
        self.refresh()
        chosen = slice(0, positions.shape[0]) if owners is None else owners
        mine = {name: self.by_owner[name][:, chosen] for name in BY_OWNER}
        fresh = mine["freed_slot"] < 0
        slots = torch.where(fresh, mine["tail"] * PAGE + mine["length"] % PAGE, mine["freed_slot"])
        numbers = (slots + self.base).flatten()
        self.slots["positions"].view(-1).index_copy_(0, numbers, positions.repeat(len(self.pools)))
        self.slots["expiry"].view(-1).index_fill_(0, numbers, NEVER)
        if "bias" in self.slots:
            self.slots["bias"].view(-1).index_fill_(0, numbers, 0)
        self.by_owner["length"][:, chosen] += fresh
        self.by_owner["newest"][:, chosen] = slots
        return slots, numbers

    def bias(self, positions: Tensor, group: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """The bias of each pool, as `attention.attend_decode` takes it.

        positions: `[owners]` int32, of the first owners' queries. group: query heads of an owner. dtype: of the
        queries.
        """
        own, owners = self.slots.get("bias"), positions.shape[0]
        bias = expiry_bias(self.slots["expiry"], self._by_page(positions), dtype) if own is None else own
        if owners * group * max(self._sizes) * PAGE <= FEW_PAIRS:
            owner_of_head = torch.arange(owners * group, device=self.owner.device)[:, None] // group
            others = self.slots["owner"] != owner_of_head
            bias = torch.where(others[:, :, None], -torch.inf, bias)
        parts: Sequence[Tensor] = bias.split(self._sizes, dim=-2)
        return parts

    def _by_page(self, positions: Tensor) -> Tensor:
        """The position of each page's owner, `[pages]`, from those of the first owners of each pool."""
        nobody = self.by_owner["length"].shape[1] - positions.shape[0]
        return F.pad(positions, (0, nobody)).repeat(len(self.pools)).index_select(0, self.owner)

    def update_visibility(self, following: Tensor) -> None:
        """Find what the next queries see, and one slot of each owner that they free.

        following: `[owners]` int32, the positions of the first owners' next queries.
        """
        expired = self.slots["expiry"] <= self._by_page(following)[:, None]
        self.by_owner["visible"].view(-1).zero_().index_add_(0, self.owner, PAGE - expired.sum(-1))
        places = torch.arange(1, PAGE + 1, dtype=torch.int32, device=expired.device)
        last = (places * (expired & (self.slots["positions"] != EMPTY))).amax(-1)
        freed = torch.where(last > 0, self._first_slot + last - 1, -1)
        self.by_owner["freed_slot"].view(-1).fill_(-1).scatter_reduce_(0, self.owner, freed, "amax")
