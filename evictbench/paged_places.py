"""Who leaves next: in every pool of every layer at once, between two tokens.

What the next query sees is decided when it is known that there is one more entry, and before that entry is written, so
that it takes the place of the one that leaves. Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.paged_means import absorb
from evictbench.pages import PagePool

if TYPE_CHECKING:
    from evictbench.policy import Policy


class Places:
    """Decides for the pools of one device, which all have as many owners."""

    def __init__(self, policy: Policy, pools: Sequence[PagePool], states: Sequence[str]) -> None:
        self.policy = policy
        self.pools = pools
        self.states = states
        self._known: tuple[tuple[int, ...], Tensor, Tensor, Tensor] | None = None

    def decide(self, following: Tensor, window: int, grown: Tensor, owners: Tensor | None, rows: int) -> None:
        """Find what leaves before the next queries come: its slot becomes reusable, and it joins its owner's means.

        following: `[owners of a pool]` int32, the position of the next query; grown: likewise, places that each pool
        has more of than at its prompt's end. owners: for whom it is decided; None: the first `rows` of them, all that
        have pages.
        """
        policy, pools = self.policy, self.pools
        count, size = len(pools), following.shape[0]
        owner, slots, base = self._owners(size)
        positions = torch.cat([pool.buffers["positions"] for pool in pools])
        state = {name: torch.cat([pool.buffers[name] for pool in pools]) for name in self.states}
        age = following.repeat(count)[owner][:, None] - positions
        protected = (positions < policy.sinks) | (age < window)
        worth = policy.worth(state, age).masked_fill_(protected, torch.inf)
        least = worth.new_full((count * size,), torch.inf)
        least.scatter_reduce_(0, owner, worth.amin(-1), "amin")
        # The later of equals: position and slot in one number.
        named = (positions.long() << 32) + slots
        named.masked_fill_((worth > least[owner][:, None]) | protected, -1)
        latest = torch.full_like(base, -1).scatter_reduce_(0, owner, named.amax(-1), "amax")
        rivals = torch.zeros_like(base).index_add_(0, owner, (~protected).sum(-1))
        places = torch.stack([pool.beside["places"] for pool in pools]) + grown
        leaves = rivals.view(count, size) > places
        victims = torch.where(leaves, ((latest & 0xFFFFFFFF) - base).view(count, size), 0)
        if owners is None:
            chosen: Tensor | slice = slice(0, rows)
            reusable = torch.where(leaves, victims, -1)
        else:
            chosen = owners
            mine = torch.zeros(size, dtype=torch.bool, device=owner.device)
            mine[owners] = True
            reusable = torch.stack([pool.reusable for pool in pools])
            reusable = torch.where(mine, torch.where(leaves, victims, -1), reusable)
        torch._foreach_copy_([pool.reusable for pool in pools], list(reusable.unbind()))
        absorb(policy, pools, chosen, victims[:, chosen], leaves[:, chosen])
        self._count(reusable)

    def _count(self, reusable: Tensor) -> None:
        """How many entries the next queries see: what is filled, but for what leaves and for means that are not yet."""
        filled = torch.stack([pool.length for pool in self.pools]) - (reusable >= 0).long()
        if self.pools[0].beside["counts"].shape[1]:
            used = torch.stack([pool.beside["counts"] for pool in self.pools]).count_nonzero(-1)
            filled = filled - torch.stack([pool.beside["room"] for pool in self.pools]) + used
        torch._foreach_copy_([pool.visible for pool in self.pools], list(filled.unbind()))

    def _owners(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of all pools' pages, one behind the other: whose each is, and its slots' numbers, `[pages, 16]`; and the
        number of each owner's pool's first slot. Kept until pages change hands."""
        changes = tuple(pool.changes for pool in self.pools)
        if self._known is None or self._known[0] != changes:
            owner = torch.cat([pool.owner + i * size for i, pool in enumerate(self.pools)])
            page = self.pools[0].buffers["positions"].shape[1]
            slots = torch.arange(owner.shape[0] * page, device=owner.device).view(-1, page)
            ends = torch.tensor([pool.pages * page for pool in self.pools], device=owner.device).cumsum(0)
            base = torch.cat((ends.new_zeros(1), ends[:-1])).repeat_interleave(size)
            self._known = changes, owner, slots, base
        return self._known[1:]
