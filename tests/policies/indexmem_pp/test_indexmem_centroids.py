"""Centroids of evicted entries: against the twin's clusters and running means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from twin_comparison import examples

from evictbench.policies.indexmem_pp.centroids import cluster, nearest, starts
from twin.indexmem_pp import Centroid, absorb, lloyd, means


def entries(count: int, seed: int, distinct: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn((distinct or count, 4), generator=generator, dtype=torch.float64)
    keys = keys[torch.randint(0, len(keys), (count,), generator=generator)] if distinct else keys
    return keys, torch.randn((count, 3), generator=generator, dtype=torch.float64)


@pytest.mark.engine
@examples(40)
@given(count=st.integers(1, 80), centroids=st.integers(1, 20), seed=st.integers(0, 1000))
def test_clusters_equal_their_definition(count: int, centroids: int, seed: int) -> None:
    keys, values = entries(count, seed)
    found_keys, found_values, sizes = cluster(keys, values, centroids, seed)
    first = starts(count, centroids, seed).tolist()
    assert len(set(first)) == len(first) == min(count, centroids)
    twin = means(keys, values, lloyd(keys, first))
    assert sizes.tolist() == [centroid.count for centroid in twin]
    torch.testing.assert_close(found_keys, torch.stack([c.key for c in twin]), atol=1e-12, rtol=0)
    torch.testing.assert_close(found_values, torch.stack([c.value for c in twin]), atol=1e-12, rtol=0)


@examples(30)
@given(
    count=st.integers(1, 60),
    centroids=st.integers(1, 20),
    distinct=st.sampled_from([None, 1, 2, 5]),
    half=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_they_stand_for_all_that_went(count: int, centroids: int, distinct: int | None, half: bool, seed: int) -> None:
    keys, values = entries(count, seed, distinct)
    if half:
        keys, values = keys.bfloat16(), values.bfloat16()
    found_keys, found_values, sizes = cluster(keys, values, centroids, seed)
    assert found_keys.dtype == found_values.dtype == (torch.float32 if half else torch.float64)
    assert len(sizes) <= min(count, centroids)
    assert bool((sizes >= 1).all())
    assert float(sizes.sum()) == count
    tolerance: dict[str, Any] = {"atol": 1e-4 if half else 1e-10, "rtol": 0}
    wide = found_keys.dtype
    torch.testing.assert_close(sizes.to(wide) @ found_keys, keys.to(wide).sum(0), **tolerance)
    torch.testing.assert_close(sizes.to(wide) @ found_values, values.to(wide).sum(0), **tolerance)
    if count <= centroids:
        torch.testing.assert_close(found_keys, keys.to(wide), **tolerance)
        assert sizes.tolist() == [1.0] * count


def test_one_by_one_they_join_the_empty_then_the_nearest() -> None:
    slots, capacity, heads = 6, torch.tensor([4, 0, 6]), 3
    count = 40
    keys, values = entries(heads * count, 7)
    keys, values = keys.view(heads, count, 4), values.view(heads, count, 3)
    held = torch.zeros((heads, slots, 4), dtype=torch.float64)
    counts = torch.zeros(heads, slots)
    twins: list[list[Centroid]] = [[], [], []]
    for one in range(count):
        chosen = nearest(held, counts, capacity, keys[:, one])
        for head in range(heads):
            absorb(twins[head], int(capacity[head]), keys[head, one], values[head, one])
            if capacity[head]:
                at = int(chosen[head])
                held[head, at] = (held[head, at] * counts[head, at] + keys[head, one]) / (counts[head, at] + 1)
                counts[head, at] += 1
    for head in range(heads):
        assert counts[head][counts[head] > 0].tolist() == [centroid.count for centroid in twins[head]]
        for at, centroid in enumerate(twins[head]):
            torch.testing.assert_close(held[head, at], centroid.key, atol=1e-12, rtol=0)


def test_starts_are_drawn_and_the_same_again() -> None:
    assert starts(5, 8).tolist() == [0, 1, 2, 3, 4]
    drawn = starts(100, 8, seed=3)
    assert drawn.tolist() == starts(100, 8, seed=3).tolist()
    assert drawn.tolist() != starts(100, 8, seed=4).tolist()
