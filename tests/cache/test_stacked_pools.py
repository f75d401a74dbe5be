"""Stacked pools: what is done for all pools at once is what each needs alone, counted slot by slot."""

from __future__ import annotations

import pytest
import torch
from test_paged import HEAD_DIM, filled

from evictbench.cache.paged import stack
from evictbench.cache.paged.attention import attend_decode
from evictbench.cache.paged.pool import PAGE, PagePool
from evictbench.cache.paged.stack import StackedPools
from evictbench.policy.step import EMPTY, NEVER

OWNERS = 6


def aging(lengths: list[int], seed: int) -> PagePool:
    """A pool whose owners hold so many entries, some of which expire at a position below 200."""
    pool, _ = filled(lengths, seed)
    drawn = torch.randint(1, 500, pool.buffers["expiry"].shape, generator=torch.Generator().manual_seed(seed))
    ends = (drawn < 200) & (pool.buffers["positions"] >= 0)
    ends.view(-1)[pool.newest] = False
    pool.buffers["expiry"][ends] = drawn[ends].to(torch.int32)
    return pool


def two_pools() -> list[PagePool]:
    return [aging([40, 3, 50, 17, 90, 33], 1), aging([16, 16, 1, 200, 8, 35], 2)]


def slots(pool: PagePool, owner: int) -> list[tuple[int, int, int]]:
    """Number, position and expiry of each of an owner's slots."""
    columns = pool.slots_of(owner), pool.entries(owner, "positions"), pool.entries(owner, "expiry")
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.engine
@pytest.mark.parametrize("few_pairs", [0, stack.FEW_PAIRS])
@pytest.mark.parametrize("owners", [2, OWNERS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bias_of_all_pools_is_that_of_each(
    few_pairs: int, owners: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "FEW_PAIRS", few_pairs)
    pools = two_pools()
    positions, rows = torch.arange(100, 100 + 10 * owners, 10, dtype=torch.int32), owners // 2
    for pool in pools:
        pool.give_back(dict.fromkeys(range(owners, OWNERS), 0))
        for name in ("keys", "values"):
            pool.buffers[name] = pool.buffers[name].to(dtype)
    query = torch.randn((rows, 6, 1, HEAD_DIM), generator=torch.Generator().manual_seed(1)).to(dtype)
    stacked = StackedPools(pools)
    stacked.refresh()
    tolerance = 1e-12 if dtype == torch.float64 else 40 * torch.finfo(dtype).eps
    for pool, bias in zip(pools, stacked.bias(positions, 3, dtype), strict=True):
        assert bias.dim() == (3 if few_pairs else 2)
        found = attend_decode(pool, query, positions, 0.5, bias)
        assert found.dtype == dtype
        torch.testing.assert_close(found, attend_decode(pool, query, positions, 0.5), atol=tolerance, rtol=0)


@pytest.mark.engine
def test_visibility_is_what_a_look_at_every_slot_says() -> None:
    pools = two_pools()
    stacked = StackedPools(pools)
    for step, owners in ((100, 6), (150, 6), (180, 4), (400, 6)):
        following = torch.arange(step, step + owners, dtype=torch.int32)
        stacked.refresh()
        before = [pool.nbytes() for pool in pools]
        stacked.update_visibility(following)
        wanting, visible = stacked.wants_page(owners)
        for index, pool in enumerate(pools):
            for owner in range(OWNERS):
                query = int(following[owner]) if owner < owners else 0
                held = slots(pool, owner)
                alive = sum(expiry > query for _, _, expiry in held)
                freed = [slot for slot, position, expiry in held if position != EMPTY and expiry <= query]
                assert int(pool.visible[owner]) == alive
                assert int(pool.freed_slot[owner]) == max(freed, default=-1)
                if owner < owners:
                    full = all(position != EMPTY for _, position, _ in held)
                    assert int(visible[index, owner]) == alive
                    assert int(wanting[index, owner]) == (full and not freed)
            assert pool.nbytes() == before[index]
        pools[0].take({1: 2})
        pools[0].give_back({1: len(pools[0].tables[1]) - 2})
        pools[1].trim(exactly=True)


@pytest.mark.engine
@pytest.mark.parametrize("chosen", [None, [0, 3, 4]])
def test_an_entry_takes_a_freed_slot_or_the_next_one(chosen: list[int] | None) -> None:
    pools = two_pools()
    stacked = StackedPools(pools)
    stacked.refresh()
    stacked.update_visibility(torch.full((OWNERS,), 10, dtype=torch.int32))
    wanting, _ = stacked.wants_page(OWNERS)
    assert bool(wanting.any())
    assert any(bool((pool.freed_slot >= 0).any()) for pool in pools)
    for pool, wants in zip(pools, wanting, strict=True):
        pool.take(dict.fromkeys(wants.nonzero()[:, 0].tolist(), 1))
    before = [[{slot: rest for slot, *rest in slots(pool, owner)} for owner in range(OWNERS)] for pool in pools]
    lengths, freed = [pool.length.clone() for pool in pools], [pool.freed_slot.clone() for pool in pools]
    owners = list(range(OWNERS)) if chosen is None else chosen
    positions = torch.tensor([1000 + owner for owner in owners], dtype=torch.int32)
    given, numbers = stacked.append(positions, None if chosen is None else torch.tensor(chosen))
    assert given.shape == (2, len(owners))
    assert torch.equal(numbers, (given + stacked.base).flatten())
    for index, pool in enumerate(pools):
        for owner in range(OWNERS):
            after = {slot: rest for slot, *rest in slots(pool, owner)}
            if owner not in owners:
                assert after == before[index][owner]
                assert int(pool.length[owner]) == int(lengths[index][owner])
                continue
            slot = int(given[index, owners.index(owner)])
            empty = [slot for slot, (position, _) in before[index][owner].items() if position == EMPTY]
            has_freed = int(freed[index][owner]) >= 0
            assert slot == (int(freed[index][owner]) if has_freed else empty[0])
            assert after == {**before[index][owner], slot: [1000 + owner, NEVER]}
            assert int(pool.newest[owner]) == slot
            assert int(pool.length[owner]) == int(lengths[index][owner]) + (not has_freed)
            assert int(pool.length[owner]) <= PAGE * len(pool.tables[owner])
    assert torch.equal(stacked.newest(OWNERS)[:, owners], given + stacked.base)


def test_pools_that_another_stack_has_taken_are_stacked_again() -> None:
    pools = two_pools()
    both, alone = StackedPools(pools), StackedPools(pools[1:])
    for step in (100, 120, 150):
        for stacked in (both, alone):
            stacked.refresh()
            stacked.update_visibility(torch.full((OWNERS,), step, dtype=torch.int32))
            assert pools[1].visible.tolist() == [
                sum(expiry > step for _, _, expiry in slots(pools[1], owner)) for owner in range(OWNERS)
            ]
