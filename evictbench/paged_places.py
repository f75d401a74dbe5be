"""Who leaves next: in every pool of every layer at once, between two tokens.

What the next query sees is decided when it is known that there is one more entry, and before that entry is written, so
that it takes the place of the one that leaves. Nothing here waits for a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.paged_means import absorb

if TYPE_CHECKING:
    from evictbench.paged_board import Board
    from evictbench.policy import Policy


def decide(
    policy: Policy,
    board: Board,
    following: Tensor,
    grown: Tensor,
    *,
    window: int,
    states: tuple[str, ...],
    owners: Tensor | None,
    rows: int,
) -> None:
    """Find what leaves before the next queries come: its slot becomes reusable, and it joins its owner's means.

    following: `[owners of a pool]` int32, the position of the next query; grown: likewise, places that each pool has
    more of than at its prompt's end. owners: for whom it is decided; None: the first `rows` of them, who have pages.
    states: the policy's slot tensors.
    """
    board.refresh()
    count, size = len(board.pools), following.shape[0]
    owner, positions, of = board.owner, board.slots["positions"], board.of_owners
    age = following.repeat(count).index_select(0, owner)[:, None] - positions
    protected = (positions < policy.sinks) | (age < window)
    worth = policy.worth({name: board.slots[name] for name in states}, age).masked_fill_(protected, torch.inf)
    least = worth.new_full((count * size,), torch.inf)
    least.scatter_reduce_(0, owner, worth.amin(-1), "amin")
    # The later of equals: position and number in one.
    named = (positions.long() << 32) + board.numbers
    named.masked_fill_((worth > least.index_select(0, owner)[:, None]) | protected, -1)
    latest = named.new_full((count * size,), -1).scatter_reduce_(0, owner, named.amax(-1), "amax")
    rivals = torch.zeros_like(latest).index_add_(0, owner, (~protected).sum(-1))
    leaves = rivals.view(count, size) > of["places"] + grown
    victims = torch.where(leaves, (latest & 0xFFFFFFFF).view(count, size) - board.base, 0)
    reusable = torch.where(leaves, victims, -1)
    chosen: Tensor | slice = slice(0, rows)
    if owners is not None:
        chosen = owners
        mine = torch.zeros(size, dtype=torch.bool, device=owner.device)
        mine[owners] = True
        reusable = torch.where(mine, reusable, of["reusable"])
    of["reusable"].copy_(reusable)
    absorb(policy, board, chosen, victims[:, chosen], leaves[:, chosen])
    # What the next queries see: what is filled, but for what leaves and for means that are not yet.
    seen = of["length"] - (reusable >= 0).long() - of["room"] + of["counts"].count_nonzero(-1)
    of["visible"].copy_(seen)
