"""One entry in, one out: what leaves the pools of all owners before their next queries come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.paged.centroids import merge

if TYPE_CHECKING:
    from evictbench.cache.paged.stack import StackedPools
    from evictbench.policy.ragged import HeadBudgetPolicy


def evict_worst(
    policy: HeadBudgetPolicy,
    stack: StackedPools,
    following: Tensor,
    grown: Tensor,
    *,
    window: int,
    states: tuple[str, ...],
    owners: Tensor | None,
    rows: int,
) -> None:
    """Find the entry of each owner that leaves before the next query comes, if one does.

    Its slot becomes the owner's freed slot, and it joins the owner's centroids. following: `[owners of a pool]` int32,
    the position of the next query. grown: `[owners of a pool]` int64, by how much a pool is larger than at its
    prompt's end. window: recent positions that are protected. states: names of the policy's slot tensors. owners:
    int64, for whom it is decided; None: the first `rows` of them, who have pages.
    """
    stack.refresh()
    count, size = len(stack.pools), following.shape[0]
    owner, positions, by_owner = stack.owner, stack.slots["positions"], stack.by_owner
    age = following.repeat(count).index_select(0, owner)[:, None] - positions
    protected = (positions < policy.sinks) | (age < window)
    scores = policy.score_at({name: stack.slots[name] for name in states}, age).masked_fill_(protected, torch.inf)
    least = scores.new_full((count * size,), torch.inf)
    least.scatter_reduce_(0, owner, scores.amin(-1), "amin")
    # Of equal scores the later position: position and number in one.
    named = (positions.long() << 32) + stack.numbers
    named.masked_fill_((scores > least.index_select(0, owner)[:, None]) | protected, -1)
    latest = named.new_full((count * size,), -1).scatter_reduce_(0, owner, named.amax(-1), "amax")
    competing = torch.zeros_like(latest).index_add_(0, owner, (~protected).sum(-1))
    leaves = competing.view(count, size) > by_owner["capacity"] + grown
    evicted = torch.where(leaves, (latest & 0xFFFFFFFF).view(count, size) - stack.base, 0)
    freed = torch.where(leaves, evicted, -1)
    chosen: Tensor | slice = slice(0, rows)
    if owners is not None:
        chosen = owners
        mine = torch.zeros(size, dtype=torch.bool, device=owner.device)
        mine[owners] = True
        freed = torch.where(mine, freed, by_owner["freed_slot"])
    by_owner["freed_slot"].copy_(freed)
    merge(policy, stack, chosen, evicted[:, chosen], leaves[:, chosen])
    # The next queries see what is filled, without what leaves and without centroids that have no entry yet.
    used = by_owner["counts"].count_nonzero(-1)
    by_owner["visible"].copy_(by_owner["length"] - (freed >= 0).long() - by_owner["centroids"] + used)
