"""Entries that are means of evicted ones: the first slots of an owner's pages, read with a bias of log count.

Where a place for one is still empty its bias is -inf. Means are computed in float32 or wider, and lie in pages in the
cache's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.pages import PagePool

if TYPE_CHECKING:
    from evictbench.policy import Policy

MEAN = -2
"""The position of a slot that holds a mean, or is kept for one."""

ELEMENTS_AT_ONCE = 2**24
"""Keys of means of so many layers are looked at together that their numbers are about this many."""


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


def absorb(policy: Policy, pools: Sequence[PagePool], owners: Tensor | slice, victims: Tensor, leaves: Tensor) -> None:
    """Let what leaves join its owner's means.

    victims: `[pools, owners]`, the slot of the entry that leaves, if it does (`leaves`). Each of these owners has a
    page.
    """
    most = pools[0].beside["counts"].shape[1]
    if most == 0:
        return
    for start, stop in _groups(pools, victims.shape[1] * most):
        _absorb(policy, pools[start:stop], owners, victims[start:stop], leaves[start:stop])


def _absorb(policy: Policy, pools: Sequence[PagePool], owners: Tensor | slice, victims: Tensor, leaves: Tensor) -> None:
    def gathered(name: str, slots: Tensor) -> Tensor:
        """`[pools, owners, ...]` of these slots, wide."""
        return torch.stack(
            [pool.buffers[name].flatten(0, 1)[at] for pool, at in zip(pools, slots.unbind(), strict=True)]
        )

    counts = torch.stack([pool.beside["counts"][owners] for pool in pools])
    room = torch.stack([pool.beside["room"][owners] for pool in pools])
    fronts = torch.stack([pool.front(counts.shape[2])[owners] for pool in pools])
    leaves = leaves & (room > 0)
    keys = gathered("keys", fronts).to(counts.dtype)
    key, value = gathered("keys", victims).to(counts.dtype), gathered("values", victims).to(counts.dtype)
    at = policy.joins(keys, counts, room, key).clamp(max=counts.shape[2] - 1)[..., None]
    slots = fronts.gather(2, at)[..., 0]
    count = counts.gather(2, at)
    mean = keys.gather(2, at[..., None].expand(*at.shape, keys.shape[-1]))[:, :, 0]
    mean_value, bias = gathered("values", slots).to(counts.dtype), gathered("bias", slots)
    after = count + 1
    moved = leaves[..., None]
    mean = torch.where(moved, (mean * count + key) / after, mean)
    mean_value = torch.where(moved, (mean_value * count + value) / after, mean_value)
    bias = torch.where(leaves, after[..., 0].log(), bias)
    counts = counts.scatter(2, at, torch.where(moved, after, count))
    for i, pool in enumerate(pools):
        for name, written in (("keys", mean[i]), ("values", mean_value[i]), ("bias", bias[i])):
            buffer = pool.buffers[name].flatten(0, 1)
            buffer.index_copy_(0, slots[i], written.to(buffer.dtype))
        pool.beside["counts"][owners] = counts[i]


def _groups(pools: Sequence[PagePool], slots: int) -> Iterator[tuple[int, int]]:
    """So many neighbouring pools at once that their means' keys are not too many numbers."""
    size = max(1, ELEMENTS_AT_ONCE // max(1, slots * pools[0].buffers["keys"].shape[-1]))
    for start in range(0, len(pools), size):
        yield start, min(len(pools), start + size)
