"""Entries that are means of evicted ones: the first slots of an owner's pages, read with a bias of log count.

Where a place for one is still empty its bias is -inf. Means are computed in float32 or wider, and lie in pages in the
cache's dtype. Where that is narrower, what rounding has taken off lies beside them in float32 (`RESTS`), and the two
add up to the mean in float32, exactly: without it a mean in bfloat16 would stop moving after some hundreds of entries,
each of which moves it by less than a last digit. Rests are counted in the bytes held, 8 · head_dim for each mean, and
no query reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from evictbench.cache.paged.stack import Board
    from evictbench.policy.base import Policy

MEAN = -2
"""The position of a slot that holds a mean, or is kept for one."""

RESTS = {"keys": "rests_of_keys", "values": "rests_of_values"}
"""By what has been rounded, the name of an owner's rests, `[owners, means, head_dim]` float32; none where the cache's
dtype is float32 or wider."""

ELEMENTS_AT_ONCE = 2**24
"""Keys of means of so many layers are looked at together that their numbers are about this many."""


def rounded(mean: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A mean in the cache's dtype, and what that leaves of it, in the mean's."""
    narrow = mean.to(dtype)
    return narrow, mean - narrow.to(mean.dtype)


def run_through(
    policy: Policy, means: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Let entries join means one after the other.

    means: keys and values `[heads, means, head_dim]`, counts `[heads, means]`, changed in place; keys, values:
    `[heads, entries, head_dim]`, in the order in which they were evicted.
    """
    mean_keys, mean_values, counts = means
    room = torch.full((counts.shape[0],), counts.shape[1], device=counts.device)
    for key, value in zip(keys.to(mean_keys.dtype).unbind(1), values.to(mean_keys.dtype).unbind(1), strict=True):
        at = policy.joins(mean_keys, counts, room, key)[:, None]
        count = counts.gather(1, at)
        wide = at[:, :, None].expand(-1, -1, key.shape[-1])
        for kept, entering in ((mean_keys, key), (mean_values, value)):
            kept.scatter_(
                1, wide, (kept.gather(1, wide) * count[..., None] + entering[:, None]) / (count + 1)[..., None]
            )
        counts.scatter_(1, at, count + 1)
    return means


def absorb(policy: Policy, board: Board, owners: Tensor | slice, victims: Tensor, leaves: Tensor) -> None:
    """Let what leaves join its owner's means.

    victims: `[pools, owners]`, the slot of the entry that leaves, any other where none does (`leaves`). Each of these
    owners has a page.
    """
    most = board.fronts.shape[2]
    if most == 0:
        return
    head_dim = board.keys[0].shape[-1]
    size = max(1, ELEMENTS_AT_ONCE // max(1, victims.shape[1] * most * head_dim))
    for start in range(0, len(board.pools), size):
        part = slice(start, start + size)
        _absorb(policy, board, part, owners, victims[part], leaves[part])


def _absorb(policy: Policy, board: Board, part: slice, owners: Tensor | slice, victims: Tensor, leaves: Tensor) -> None:
    """The same for some of the pools."""
    every, rooms, fronts = (of[part][:, owners] for of in (*_of(board, "counts", "room"), board.fronts))
    wide, most = every.dtype, fronts.shape[2]
    taken = _gathered(board.keys[part], torch.cat((fronts.flatten(1), victims), dim=1)).to(wide)
    keys, key = taken.split((fronts.shape[1] * most, victims.shape[1]), dim=1)
    keys = keys.unflatten(1, (-1, most))
    at = policy.joins(keys, every, rooms, key).clamp(max=most - 1)[..., None]
    slots, count = fronts.gather(2, at)[..., 0], every.gather(2, at)
    old_key = keys.gather(2, at[..., None].expand(*at.shape, keys.shape[-1]))[:, :, 0]
    old_value, value = _gathered(board.values[part], torch.cat((slots, victims), dim=1)).to(wide).chunk(2, dim=1)
    moved = (leaves & (rooms > 0))[..., None]
    after = count + 1
    for name, flat, old, new in (("keys", board.keys, old_key, key), ("values", board.values, old_value, value)):
        rests = board.of_owners.get(RESTS[name])
        place = at[..., None].expand(*at.shape, new.shape[-1])
        if rests is not None:
            old = old + rests[part][:, owners].gather(2, place)[:, :, 0]
        mean = torch.where(moved, (old * count + new) / after, old)
        if rests is not None:
            mean, rest = rounded(mean, flat[0].dtype)
            rests[part][:, owners] = rests[part][:, owners].scatter(2, place, rest[:, :, None])
        for buffer, slot, written in zip(flat[part], slots.unbind(), mean.unbind(), strict=True):
            buffer.index_copy_(0, slot, written)
    bias, flat_slots = board.slots["bias"].view(-1), (slots + board.base[part]).flatten()
    logs = torch.where(moved[..., 0].flatten(), after.log().flatten(), bias[flat_slots])
    bias.index_copy_(0, flat_slots, logs)
    every = every.scatter(2, at, torch.where(moved, after, count))
    board.of_owners["counts"][part][:, owners] = every


def _of(board: Board, *names: str) -> tuple[Tensor, ...]:
    return tuple(board.of_owners[name] for name in names)


def _gathered(buffers: Sequence[Tensor], slots: Tensor) -> Tensor:
    """`[pools, slots, ...]` of these slots of each."""
    return torch.stack([buffer.index_select(0, at) for buffer, at in zip(buffers, slots.unbind(), strict=True)])
