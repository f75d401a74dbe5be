"""What is known of the entries of many pools, side by side, so that one operation serves all layers of a device.

All but keys and values: a pool's buffers and numbers are parts of the board's while no page changes hands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evictbench.pages import NEVER, PAGE, PagePool

BY_OWNER = ("length", "newest", "visible", "tail", "reusable")


class Board:
    """The pools of one device, which all have as many owners.

    slots: by name, `[pages of all pools, 16(, width)]`; of_owners: by name, `[pools, owners, ...]`. owner: whose each
    page is, counted through all pools, `[pages]`; numbers: of all slots, `[pages, 16]`; base: the number of each pool's
    first slot, `[pools, 1]`; fronts: the slots of each owner's means in its pool, `[pools, owners, means]`.
    """

    def __init__(self, pools: Sequence[PagePool]) -> None:
        self.pools = pools
        self.slots: dict[str, Tensor] = {}
        self.of_owners: dict[str, Tensor] = {}
        self._changes: list[int] | None = None

    def refresh(self) -> None:
        """Put everything side by side again, if pages have changed hands."""
        pools = self.pools
        changes = [pool.changes for pool in pools]
        if self._changes == changes and all(pool.board is self for pool in pools):
            return
        names = [name for name in pools[0].buffers if name not in ("keys", "values")]
        sizes = [pool.pages for pool in pools]
        for name in names:
            self.slots[name] = torch.cat([pool.buffers[name] for pool in pools])
            for pool, part in zip(pools, self.slots[name].split(sizes), strict=True):
                pool.buffers[name] = part
        for name in BY_OWNER:
            self.of_owners[name] = torch.stack([getattr(pool, name) for pool in pools])
            for pool, part in zip(pools, self.of_owners[name].unbind(), strict=True):
                setattr(pool, name, part)
        for name in pools[0].beside:
            self.of_owners[name] = torch.stack([pool.beside[name] for pool in pools])
            for pool, part in zip(pools, self.of_owners[name].unbind(), strict=True):
                pool.beside[name] = part
        device, owners = pools[0].device, pools[0].length.shape[0]
        self.owner = torch.cat([pool.owner + i * owners for i, pool in enumerate(pools)])
        self.numbers = torch.arange(sum(sizes) * PAGE, device=device).view(-1, PAGE)
        starts = torch.tensor([0, *sizes[:-1]]).cumsum(0) * PAGE
        self.base = starts.to(device)[:, None]
        self.fronts = torch.stack([pool.front(pool.beside["counts"].shape[1]) for pool in pools])
        self.keys, self.values = ([pool.buffers[name].flatten(0, 1) for pool in pools] for name in ("keys", "values"))
        for pool in pools:
            pool.board = self  # another that had these pools has lost them
        self._changes = changes

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
        self.slots["bias"].view(-1).index_fill_(0, flat, 0)
        of["length"] += fresh
        of["newest"].copy_(slots)
        return slots, flat
