"""Centroids: means of evicted entries, each with a key, a value, and the number of its entries.

A centroid of n entries is attended to as one entry whose logit is raised by log n. Keys are rotated; distance is
Euclidean. Arithmetic is in float32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 15
"""The iterations of Lloyd's algorithm, as published."""


def starts(entries: int, centroids: int, seed: int = 0) -> Tensor:
    """The indices of the entries at which clusters start, `[centroids]` int64, drawn without repetition by the seed. Up
    to `centroids` entries are all taken, in order."""
    if entries <= centroids:
        return torch.arange(entries)
    return torch.randperm(entries, generator=torch.Generator().manual_seed(seed))[:centroids]


def cluster(keys: Tensor, values: Tensor, centroids: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Mean keys, mean values `[clusters, head_dim]` and sizes `[clusters]` by k-means over keys, float32 or wider.

    keys, values: `[n, head_dim]`. centroids: the most clusters. Clusters start at `starts`. Up to `centroids` entries
    are a cluster each.
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    keys, values = keys.to(wide), values.to(wide)
    centres = keys[starts(keys.shape[0], centroids, seed).to(keys.device)]
    if keys.shape[0] <= centroids:
        return centres, values, keys.new_ones(keys.shape[0])
    return cluster_from(keys, values, centres)


def cluster_from(keys: Tensor, values: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`cluster` from given centres `[clusters, head_dim]`, in the keys' dtype.

    A cluster that loses all its entries stays where it is, and is left out if it is empty at the end.
    """
    for _ in range(ITERATIONS):
        members = _nearest(keys, centres)
        sizes, sums = _sums(members, keys, centres.shape[0])
        centres = torch.where(sizes[:, None] > 0, sums / sizes[:, None].clamp(min=1), centres)
    held = sizes > 0
    value_sums = _sums(members, values, centres.shape[0])[1]
    return sums[held] / sizes[held, None], value_sums[held] / sizes[held, None], sizes[held]


def nearest(keys: Tensor, counts: Tensor, capacity: Tensor, evicted: Tensor) -> Tensor:
    """The index of the centroid that an evicted entry joins, `[...]` int64: the first empty one, else the nearest.

    keys: `[..., centroids, head_dim]`. counts: `[..., centroids]`, 0 for an empty one. capacity: `[...]`, the most
    centroids. evicted: `[..., head_dim]`, the entry's key.
    """
    used = (counts > 0).sum(-1)
    distance = (keys - evicted[..., None, :]).square().sum(-1).masked_fill(counts == 0, torch.inf)
    return torch.where(used < capacity, used, distance.argmin(-1))


def _nearest(keys: Tensor, centres: Tensor) -> Tensor:
    return (centres.square().sum(-1) - 2 * keys @ centres.mT).argmin(-1)


def _sums(members: Tensor, vectors: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """The number of vectors in each cluster `[clusters]`, and their sum `[clusters, head_dim]`."""
    sizes = vectors.new_zeros(clusters).index_add_(0, members, vectors.new_ones(members.shape[0]))
    return sizes, vectors.new_zeros((clusters, vectors.shape[1])).index_add_(0, members, vectors)
