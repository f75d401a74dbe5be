"""What is known of the entries of many pools, side by side, so that one operation serves all layers of a device.

All but keys and values: a pool's buffers and numbers are parts of the board's while no page changes hands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evictbench.cache.paged.attention import hiding
from evictbench.cache.paged.pool import EMPTY, NEVER, PAGE, PagePool

BY_OWNER = ("length", "newest", "visible", "tail", "reusable")

FEW = 2**15
"""Up to so many pairs of a query and a slot of its pool, all of them take less time in one product than page by page
those that are needed."""


class Board:
    """The pools of one device, which all have as many owners.

    slots: by name, `[pages of all pools, 16(, width)]`; of_owners: by name, `[pools, owners, ...]`. owner: whose each
    page is, counted through all pools, `[pages]`; base: the number of each pool's first slot, `[pools, 1]`. Where
    entries are contested also numbers: of all slots, `[pages, 16]`; fronts: the slots of each owner's means in its
    pool, `[pools, owners, means]`; keys and values of each pool, `[slots, head_dim]`.
    """

    def __init__(self, pools: Sequence[PagePool]) -> None:
        self.pools = pools
        self.slots: dict[str, Tensor] = {}
        self.of_owners: dict[str, Tensor] = {}
        self._changes: list[int] | None = None
        self._sizes: list[int] = []
        self._parts: dict[str, Sequence[Tensor]] = {}

    def refresh(self) -> None:
        """Put side by side again what has moved, if pages have changed hands."""
        pools = self.pools
        changes = [pool.changes for pool in pools]
        if self._changes == changes and all(pool.board is self for pool in pools):
            return
        self._number([pool.pages for pool in pools])
        attributes, buffers = [vars(pool) for pool in pools], [pool.buffers for pool in pools]
        for name in buffers[0]:
            if name not in ("keys", "values"):
                self._join(self.slots, name, buffers, torch.cat)
        self._join(self.slots, "owner", attributes, torch.cat)
        for name in BY_OWNER:
            self._join(self.of_owners, name, attributes, torch.stack)
        for name in pools[0].beside:
            self._join(self.of_owners, name, [pool.beside for pool in pools], torch.stack)
        self.owner = self.slots["owner"] + self._first_owner
        if pools[0].beside:
            self.numbers = torch.arange(self.owner.shape[0] * PAGE, device=self.owner.device).view(-1, PAGE)
            self.fronts = torch.stack([pool.front(pool.beside["counts"].shape[1]) for pool in pools])
            self.keys, self.values = ([held[name].flatten(0, 1) for held in buffers] for name in ("keys", "values"))
        for pool in pools:
            pool.board = self  # another that had these pools has lost them
        self._changes = changes

    def _number(self, sizes: list[int]) -> None:
        """Numbers that follow from how many pages each pool has."""
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
        self, whole: dict[str, Tensor], name: str, of_pools: list[dict[str, Any]], how: Callable[..., Tensor]
    ) -> None:
        """Make one tensor of what the pools have by a name, and give them its parts, unless they have those already."""
        held = [of[name] for of in of_pools]
        if all(own is part for own, part in zip(held, self._parts.get(name, [None] * len(held)), strict=True)):
            return
        whole[name] = how(held)
        self._parts[name] = whole[name].split(self._sizes) if how is torch.cat else whole[name].unbind()
        for of, part in zip(of_pools, self._parts[name], strict=True):
            of[name] = part

    def room(self, owners: int) -> Tensor:
        """Of the first owners of each pool: who wants a page for its next entry, and how many entries it sees already,
        `[2, pools, owners]` int64."""
        self.refresh()
        of = {name: self.of_owners[name][:, :owners] for name in BY_OWNER}
        return torch.stack(((of["reusable"] < 0) & (of["length"] % PAGE == 0), of["visible"]))

    def newest(self, owners: int) -> Tensor:
        """The numbers of the slots that the first owners wrote last, `[pools, owners]`."""
        self.refresh()
        return self.of_owners["newest"][:, :owners] + self.base

    def enter(self, owners: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """A slot for the next entry of each of the first owners, in every pool, visible from now on. positions:
        `[owners]` int32. Returns the slots, `[pools, owners]`, and their numbers, flat; the rest is to be written yet.
        """
        self.refresh()
        of = {name: self.of_owners[name][:, :owners] for name in BY_OWNER}
        fresh = of["reusable"] < 0
        slots = torch.where(fresh, of["tail"] * PAGE + of["length"] % PAGE, of["reusable"])
        flat = (slots + self.base).flatten()
        self.slots["positions"].view(-1).index_copy_(0, flat, positions.repeat(len(self.pools)))
        self.slots["deadlines"].view(-1).index_fill_(0, flat, NEVER)
        if "bias" in self.slots:
            self.slots["bias"].view(-1).index_fill_(0, flat, 0)
        of["length"] += fresh
        of["newest"].copy_(slots)
        return slots, flat

    def bias(self, positions: Tensor, group: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """What the queries at these positions, `[owners]` int32, for the first owners, do not see, and how much what
        they see counts, by pool, as `paged_attention.attend_one` takes it. group: queries of an owner."""
        own, owners = self.slots.get("bias"), positions.shape[0]
        hides = hiding(self.slots["deadlines"], self._by_page(positions), dtype) if own is None else own
        if owners * group * max(self._sizes) * PAGE <= FEW:
            of_heads = torch.arange(owners * group, device=self.owner.device)[:, None] // group
            others = self.slots["owner"] != of_heads
            hides = torch.where(others[:, :, None], -torch.inf, hides)
        parts: Sequence[Tensor] = hides.split(self._sizes, dim=-2)
        return parts

    def _by_page(self, positions: Tensor) -> Tensor:
        """Positions of the first owners of each pool, one for each page, `[pages]`."""
        nobody = self.of_owners["length"].shape[1] - positions.shape[0]
        return F.pad(positions, (0, nobody)).repeat(len(self.pools)).index_select(0, self.owner)

    def look_ahead(self, following: Tensor) -> None:
        """Find what the next queries see and what they free, in all pools. following: their positions, `[owners]` int32
        for the first owners."""
        hidden = self.slots["deadlines"] <= self._by_page(following)[:, None]
        self.of_owners["visible"].view(-1).zero_().index_add_(0, self.owner, PAGE - hidden.sum(-1))
        places = torch.arange(1, PAGE + 1, dtype=torch.int32, device=hidden.device)
        last = (places * (hidden & (self.slots["positions"] != EMPTY))).amax(-1)
        dead = torch.where(last > 0, self._first_slot + last - 1, -1)
        self.of_owners["reusable"].view(-1).fill_(-1).scatter_reduce_(0, self.owner, dead, "amax")


class Boards:
    """The boards of a cache, made as they are asked for."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Board] = {}

    def of(self, pools: Iterable[PagePool]) -> Board:
        """The one of these pools."""
        pools = list(pools)
        key = tuple(id(pool) for pool in pools)
        if key not in self._made:
            self._made[key] = Board(pools)
        return self._made[key]
