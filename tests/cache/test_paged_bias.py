"""Attention over pages where a bias weighs entries and hides others, against one softmax per owner."""

from __future__ import annotations

import pytest
import torch

from evictbench.cache.buffers import ByteCounter
from evictbench.cache.paged.attention import attend_with_flex, by_page
from evictbench.cache.paged.pool import PagePool
from evictbench.cache.paged.stack import StackedPools
from evictbench.policy import NEVER, SlotTensor

HEAD_DIM = 8


def weighed(lengths: list[int], dtype: torch.dtype) -> PagePool:
    """Owners with so many entries; every third counts for several, every fifth is hidden."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    pool = PagePool(
        len(lengths),
        torch.empty(0, HEAD_DIM, dtype=dtype),
        ByteCounter(),
        {"bias": SlotTensor(wide, fill=-torch.inf)},
        {"counts": torch.zeros((len(lengths), 3))},
    )
    for owner, length in enumerate(lengths):
        bias = torch.zeros((1, length), dtype=wide)
        bias[:, ::3] = torch.arange(1, length + 1)[::3].log()
        bias[:, 4::5] = -torch.inf
        entries = {
            "keys": torch.randn((1, length, HEAD_DIM), generator=generator).to(dtype),
            "values": torch.randn((1, length, HEAD_DIM), generator=generator).to(dtype),
            "positions": torch.arange(length, dtype=torch.int32)[None],
            "expiry": torch.full((1, length), NEVER, dtype=torch.int32),
            "bias": bias,
        }
        pool.write_chunk(owner, entries, length)
    pool.take({1: 1})  # a page with nothing in it, then in stock
    pool.give_back({1: len(pool.tables[1]) - 1})
    return pool


@pytest.mark.engine
@pytest.mark.parametrize("one_product", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_bias_is_part_of_the_logits(dtype: torch.dtype, one_product: bool) -> None:
    lengths = [1, 37, 16, 300]
    pool = weighed(lengths, dtype)
    query = torch.randn((2, 6, 1, HEAD_DIM), generator=torch.Generator().manual_seed(1)).to(dtype)
    positions = torch.full((4,), 1000, dtype=torch.int32)
    bias_of_all = None
    if one_product:  # few enough that every query meets every entry
        stack = StackedPools([pool])
        stack.refresh()
        (bias_of_all,) = stack.bias(positions, 3, pool.buffers["bias"].dtype)
        assert bias_of_all.dim() == 3
    found = by_page(pool, query, positions, 0.5, bias_of_all)
    assert found.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 40 * torch.finfo(dtype).eps
    for owner in range(4):
        keys, values, bias = (pool.entries(owner, name).double() for name in ("keys", "values", "bias"))
        own = query.view(4, 3, HEAD_DIM)[owner].double()
        expected = (own @ keys.T * 0.5 + bias).softmax(-1) @ values
        torch.testing.assert_close(found.view(4, 3, HEAD_DIM)[owner].double(), expected, atol=tolerance, rtol=0)
    if dtype != torch.bfloat16:
        flex = attend_with_flex(pool, query, positions, 0.5, compiled=False)
        torch.testing.assert_close(flex, found, atol=100 * tolerance, rtol=0)


def test_the_first_of_more_owners_attend_alone() -> None:
    pool = weighed([20, 40, 30, 50], torch.float64)
    query = torch.randn((2, 6, 1, HEAD_DIM), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    both = by_page(pool, query, torch.full((4,), 1000, dtype=torch.int32), 0.5)
    pool.give_back({2: 0, 3: 0})
    one = by_page(pool, query[:1], torch.full((2,), 1000, dtype=torch.int32), 0.5)
    torch.testing.assert_close(one, both[:1], atol=1e-12, rtol=0)


def test_the_tensors_of_an_owner_go_with_it() -> None:
    pool = weighed([20, 40], torch.float64)
    pool.owner_tensors["counts"][1] = torch.tensor([3.0, 1.0, 0.0])
    copy = weighed([5, 5], torch.float64)
    copy.move_owners(1, 0, 1)
    more = PagePool(4, pool.buffers["keys"], ByteCounter(), {"bias": SlotTensor(torch.float64)}, pool.owner_tensors)
    more.owner_tensors["counts"] = torch.zeros((4, 3))
    more.copy_from(pool, 2)
    assert more.owner_tensors["counts"][3].tolist() == [3.0, 1.0, 0.0]
    assert torch.equal(more.entries(3, "bias"), pool.entries(1, "bias"))
    assert torch.equal(more.front(2)[2:] % 16, torch.tensor([[0, 1], [0, 1]]))
