"""Centroids: entries that are means of evicted entries. They are the first slots of an owner's pages.

A centroid of n entries is read with a bias of log n; a slot for a centroid that has no entry yet has a bias of -inf.
Means are computed in float32 or wider, and lie in pages in the cache's dtype. If that is narrower, the rounding errors
lie beside them in float32 (`RESIDUALS`), and mean and residual add up to the mean in float32, exactly: without them a
mean in bfloat16 would stop moving after some hundreds of entries, each of which moves it by less than a last digit.
Residuals are counted in the bytes held, 8 * head_dim for each centroid, and no query reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.policy.tiles import ELEMENTS_AT_ONCE

if TYPE_CHECKING:
    from evictbench.cache.paged.stack import StackedPools
    from evictbench.policy.ragged import HeadBudgetPolicy

CENTROID = -2
"""The position of a slot that holds a centroid, or is kept for one."""

RESIDUALS = {"keys": "residuals_of_keys", "values": "residuals_of_values"}
"""The names of the owners' tensors of rounding errors, `[owners, centroids, head_dim]` float32, of keys and of values.
There are none where the cache's dtype is float32 or wider."""

Means = tuple[Tensor, Tensor, Tensor]
"""Keys and values `[heads, centroids, head_dim]`, and the number of entries that each stands for, `[heads,
centroids]`."""


def rounded(mean: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A mean in the cache's dtype, and the rounding error in the mean's own dtype."""
    narrow = mean.to(dtype)
    return narrow, mean - narrow.to(mean.dtype)


def merge_in_order(policy: HeadBudgetPolicy, means: Means, keys: Tensor, values: Tensor) -> Means:
    """Let entries join centroids one after the other.

    means: changed in place. keys, values: `[heads, entries, head_dim]`, in the order in which they were evicted.
    """
    mean_keys, mean_values, counts = means
    capacity = torch.full((counts.shape[0],), counts.shape[1], device=counts.device)
    for key, value in zip(keys.to(mean_keys.dtype).unbind(1), values.to(mean_keys.dtype).unbind(1), strict=True):
        at = policy.nearest_centroid(mean_keys, counts, capacity, key)[:, None]
        count = counts.gather(1, at)
        wide = at[:, :, None].expand(-1, -1, key.shape[-1])
        for mean, entering in ((mean_keys, key), (mean_values, value)):
            total = mean.gather(1, wide) * count[..., None] + entering[:, None]
            mean.scatter_(1, wide, total / (count + 1)[..., None])
        counts.scatter_(1, at, count + 1)
    return means


def merge(
    policy: HeadBudgetPolicy, stack: StackedPools, owners: Tensor | slice, evicted: Tensor, leaves: Tensor
) -> None:
    """Let each evicted entry join a centroid of its owner.

    owners: those that have pages. evicted: `[pools, owners]` int64, the slot of the entry that leaves; any slot where
    none does. leaves: `[pools, owners]` bool, where one does.
    """
    most = stack.fronts.shape[2]
    if most == 0:
        return
    head_dim = stack.keys[0].shape[-1]
    size = max(1, ELEMENTS_AT_ONCE // max(1, evicted.shape[1] * most * head_dim))
    for start in range(0, len(stack.pools), size):
        part = slice(start, start + size)
        _merge(policy, stack, part, owners, evicted[part], leaves[part])


def _merge(
    policy: HeadBudgetPolicy,
    stack: StackedPools,
    part: slice,
    owners: Tensor | slice,
    evicted: Tensor,
    leaves: Tensor,
) -> None:
    """`merge` for some of the pools, those of `part`."""
    counts, capacity, fronts = (
        tensor[part][:, owners] for tensor in (stack.by_owner["counts"], stack.by_owner["centroids"], stack.fronts)
    )
    wide, most = counts.dtype, fronts.shape[2]
    both = _gathered(stack.keys[part], torch.cat((fronts.flatten(1), evicted), dim=1)).to(wide)
    keys, key = both.split((fronts.shape[1] * most, evicted.shape[1]), dim=1)
    keys = keys.unflatten(1, (-1, most))
    at = policy.nearest_centroid(keys, counts, capacity, key).clamp(max=most - 1)[..., None]
    slots, count = fronts.gather(2, at)[..., 0], counts.gather(2, at)
    old_key = keys.gather(2, at[..., None].expand(*at.shape, keys.shape[-1]))[:, :, 0]
    old_value, value = _gathered(stack.values[part], torch.cat((slots, evicted), dim=1)).to(wide).chunk(2, dim=1)
    moved = (leaves & (capacity > 0))[..., None]
    after = count + 1
    for name, flat, old, new in (("keys", stack.keys, old_key, key), ("values", stack.values, old_value, value)):
        residuals = stack.by_owner.get(RESIDUALS[name])
        index = at[..., None].expand(*at.shape, new.shape[-1])
        if residuals is not None:
            old = old + residuals[part][:, owners].gather(2, index)[:, :, 0]
        mean = torch.where(moved, (old * count + new) / after, old)
        if residuals is not None:
            mean, residual = rounded(mean, flat[0].dtype)
            residuals[part][:, owners] = residuals[part][:, owners].scatter(2, index, residual[:, :, None])
        for buffer, slot, written in zip(flat[part], slots.unbind(), mean.unbind(), strict=True):
            buffer.index_copy_(0, slot, written)
    bias, numbers = stack.slots["bias"].view(-1), (slots + stack.base[part]).flatten()
    logs = torch.where(moved[..., 0].flatten(), after.log().flatten(), bias[numbers])
    bias.index_copy_(0, numbers, logs)
    stack.by_owner["counts"][part][:, owners] = counts.scatter(2, at, torch.where(moved, after, count))


def _gathered(buffers: Sequence[Tensor], slots: Tensor) -> Tensor:
    """`[pools, slots, ...]`: for each pool its buffer `[all slots, ...]` at these slots `[pools, slots]`."""
    return torch.stack([buffer.index_select(0, at) for buffer, at in zip(buffers, slots.unbind(), strict=True)])
