"""Means that stand for what was evicted: a key, a value, and how many entries they are of.

A centroid of n entries is read as one entry whose logit is raised by log n. Keys are the rotated ones; distance is
Euclidean. Arithmetic is in float32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 15
"""Of Lloyd's algorithm, as published."""


def starts(entries: int, centroids: int, seed: int = 0) -> Tensor:
    """The entries at which clusters start, `[centroids]` int64: drawn without repetition; all of them, in order, where
    there are no more than that."""
    if entries <= centroids:
        return torch.arange(entries)
    return torch.randperm(entries, generator=torch.Generator().manual_seed(seed))[:centroids]


def cluster(keys: Tensor, values: Tensor, centroids: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """k-means over keys `[n, head_dim]`: mean keys, mean values `[clusters, head_dim]` and sizes `[clusters]`, float32
    or wider.

    Clusters start at `starts`; one that loses all its entries stays where it is, and is left out if it has none at the
    end. With no more entries than centroids each is its own.
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    keys, values = keys.to(wide), values.to(wide)
    centres = keys[starts(keys.shape[0], centroids, seed).to(keys.device)]
    if keys.shape[0] <= centroids:
        return centres, values, keys.new_ones(keys.shape[0])
    for _ in range(ITERATIONS):
        sizes, sums = _sums(_nearest(keys, centres), keys, centres.shape[0])
        centres = torch.where(sizes[:, None] > 0, sums / sizes[:, None].clamp(min=1), centres)
    members = _nearest(keys, centres)
    sizes, sums = _sums(members, keys, centres.shape[0])
    held = sizes > 0
    of_values = _sums(members, values, centres.shape[0])[1]
    return sums[held] / sizes[held, None], of_values[held] / sizes[held, None], sizes[held]


def choose(keys: Tensor, counts: Tensor, room: Tensor, entering: Tensor) -> Tensor:
    """Which centroid one evicted entry joins, `[...]` int64: the first that has none yet, else the nearest.

    keys `[..., centroids, head_dim]`, counts `[..., centroids]`, room `[...]`: how many there may be; entering
    `[..., head_dim]`.
    """
    used = (counts > 0).sum(-1)
    distance = (keys - entering[..., None, :]).square().sum(-1).masked_fill(counts == 0, torch.inf)
    return torch.where(used < room, used, distance.argmin(-1))


def _nearest(keys: Tensor, centres: Tensor) -> Tensor:
    return (centres.square().sum(-1) - 2 * keys @ centres.mT).argmin(-1)


def _sums(members: Tensor, vectors: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """How many vectors each cluster has, and their sum."""
    sizes = vectors.new_zeros(clusters).index_add_(0, members, vectors.new_ones(members.shape[0]))
    return sizes, vectors.new_zeros((clusters, vectors.shape[1])).index_add_(0, members, vectors)
