"""Future attention in tiles against the dense definition, and its memory."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from largest_tensor import LargestTensor
from torch import Tensor

from evictbench.policy import future_attention
from twin import future as twin

Label = Literal["mean", "max"]
SCALING = 0.7


def texts(seed: int, rows: int, kv_heads: int, group: int, length: int, head_dim: int = 8) -> tuple[Tensor, Tensor]:
    """Queries and keys in float32 whose attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, kv_heads * group, length, head_dim, generator=generator)
    return query, torch.randn(rows, kv_heads, length, head_dim, generator=generator)


def check(query: Tensor, key: Tensor, window: int, label: Label, normalisers: Tensor | None = None) -> None:
    rows, kv_heads, length, _ = key.shape
    found = future_attention.future_attention(
        query, key, window=window, scaling=SCALING, label=label, normalisers=normalisers
    )
    assert found.shape == (rows, kv_heads, query.shape[1] // kv_heads, length)
    assert found.dtype == torch.float32
    for row in range(rows):
        given = None if normalisers is None else normalisers[row]
        dense = twin.future_attention(
            query[row], key[row], window=window, scaling=SCALING, label=label, given=given
        ).view(kv_heads, -1, length)
        torch.testing.assert_close(found[row].double().exp(), dense, atol=1e-5, rtol=1e-5)
        # In logarithms too, for all that float32 can hold.
        held = dense > 1e-37
        torch.testing.assert_close(found[row].double()[held], dense.log()[held], atol=1e-5, rtol=1e-5)
        assert (found[row][..., max(0, length - window) :] == -torch.inf).all()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 2),
    shape=st.sampled_from([(2, 2), (1, 3), (3, 1)]),
    length=st.integers(1, 40),
    window=st.one_of(st.integers(1, 8), st.integers(1, 50)),
    label=st.sampled_from(["mean", "max"]),
    shifted=st.booleans(),
    tile=st.sampled_from([1, 7, 64, 2**20]),
)
def test_it_equals_the_dense_definition(
    seed: int, rows: int, shape: tuple[int, int], length: int, window: int, label: Label, shifted: bool, tile: int
) -> None:
    """shifted: normalisers of another attention than the dense one."""
    query, key = texts(seed, rows, *shape, length)
    normalisers = None
    if shifted:
        normalisers = torch.stack([twin.normalisers(q, k, SCALING) for q, k in zip(query, key, strict=True)])
        normalisers = (
            normalisers + torch.randn(normalisers.shape, generator=torch.Generator().manual_seed(seed))
        ).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(future_attention.TILE_ELEMENTS, "cpu", tile)
        check(query, key, window, label, normalisers)


@pytest.mark.parametrize("label", ["mean", "max"])
@pytest.mark.parametrize(("length", "window"), [(512, 32), (301, 1), (257, 256), (100, 100), (64, 500)])
def test_long_texts_in_the_tiles_it_uses(length: int, window: int, label: Label) -> None:
    query, key = texts(length, 1, 2, 2, length)
    check(query * 2, key, window, label)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1000), length=st.integers(1, 40), window=st.integers(1, 20), eps=st.sampled_from([1e-6, 0.1])
)
def test_labels_are_those_of_the_query_head_that_looks_most(seed: int, length: int, window: int, eps: float) -> None:
    query, key = texts(seed, 2, 2, 3, length)
    for label in ("mean", "max"):
        found = future_attention.future_labels(query, key, window=window, scaling=SCALING, label=label, epsilon=eps)
        for row in range(2):
            wanted = twin.future_labels(query[row], key[row], window=window, scaling=SCALING, label=label, eps=eps)
            torch.testing.assert_close(found[row].double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("length", "tile"), [(61, 9), (61, 64), (8, 3)])
def test_several_windows_at_once_are_each_alone(
    length: int, tile: int, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(future_attention, "SEVERAL_WINDOWS_TILE", tile)
    query, key = texts(length, 2, 2, 2, length)
    normalisers = torch.stack([twin.normalisers(q, k, SCALING) for q, k in zip(query, key, strict=True)]).float()
    options = {"scaling": SCALING, "normalisers": normalisers + 1 if given else None}
    windows = (1, 7, 20, 61)
    found = future_attention.labels_behind(query, key, windows=windows, **options)
    assert len(found) == 8
    for (label, window), labels in found.items():
        alone = future_attention.future_labels(query, key, window=window, label=label, **options)
        torch.testing.assert_close(labels, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("length", "window"), [(40, 7), (130, 1), (16, 16)])
def test_with_keys_that_ask_and_queries_that_answer(length: int, window: int, given: bool) -> None:
    """The form that a GPU runs, uncompiled."""
    query, key = texts(length, 2, 2, 2, length)
    normalisers = torch.stack([twin.normalisers(q, k, SCALING) for q, k in zip(query, key, strict=True)]).float()
    total = future_attention._by_flex_attention(query, key, window, SCALING, normalisers if given else None)
    count = (length - window - torch.arange(length)).clamp(min=1)
    for row in range(2):
        dense = twin.future_attention(query[row], key[row], window=window, scaling=SCALING, label="mean")
        torch.testing.assert_close(total[row].double().exp() / count, dense.view(2, 2, length), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("label", ["mean", "max"])
def test_no_tensor_is_the_text_squared(label: Label, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(future_attention.TILE_ELEMENTS, "cpu", 2**12)
    sizes = []
    for length in (256, 512, 1024):
        query, key = texts(0, 1, 1, 2, length)
        with LargestTensor() as mode:
            future_attention.future_attention(query, key, window=16, scaling=SCALING, label=label)
        sizes.append(mode.elements)
    assert sizes[2] <= 2.1 * sizes[1] <= 2.1**2 * sizes[0]
    assert sizes[2] < 1024 * 1024 / 8
