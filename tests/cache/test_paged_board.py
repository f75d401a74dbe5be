"""Pools side by side: what a board does for all of them is what each would do alone."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from test_paged import HEAD_DIM, filled

from evictbench.cache.paged import stack
from evictbench.cache.paged.attention import attend_one
from evictbench.cache.paged.pool import PagePool
from evictbench.cache.paged.stack import Board


def aging(lengths: list[int], seed: int) -> PagePool:
    """Owners with so many entries, some of which end at a position below 500."""
    pool, _ = filled(lengths, seed)
    drawn = torch.randint(1, 500, pool.buffers["deadlines"].shape, generator=torch.Generator().manual_seed(seed))
    ends = (drawn < 200) & (pool.buffers["positions"] >= 0)
    ends.view(-1)[pool.newest] = False
    pool.buffers["deadlines"][ends] = drawn[ends].to(torch.int32)
    return pool


def pools() -> list[PagePool]:
    return [aging([40, 3, 50, 17, 90, 33], 1), aging([16, 16, 1, 200, 8, 35], 2)]


@pytest.mark.engine
@pytest.mark.parametrize("few", [0, stack.FEW])
@pytest.mark.parametrize("owners", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_hidden_may_be_known_before(
    few: int, owners: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "FEW", few)
    made = pools()
    positions, rows = torch.arange(100, 100 + 10 * owners, 10, dtype=torch.int32), owners // 2
    for pool in made:
        pool.give_back(dict.fromkeys(range(owners, 6), 0))
        for name in ("keys", "values"):
            pool.buffers[name] = pool.buffers[name].to(dtype)
    query = torch.randn((rows, 6, 1, HEAD_DIM), generator=torch.Generator().manual_seed(1)).to(dtype)
    board = Board(made)
    board.refresh()
    tolerance = 1e-12 if dtype == torch.float64 else 40 * torch.finfo(dtype).eps
    for pool, bias in zip(made, board.bias(positions, 3, dtype), strict=True):
        assert bias.dim() == (3 if few else 2)
        found = attend_one(pool, query, positions, 0.5, bias)
        assert found.dtype == dtype
        torch.testing.assert_close(found, attend_one(pool, query, positions, 0.5), atol=tolerance, rtol=0)


@pytest.mark.engine
def test_all_pools_look_ahead_as_each_alone() -> None:
    made = pools()
    alone = deepcopy(made)
    board = Board(made)
    for step, owners in ((100, 6), (150, 6), (180, 4), (400, 6)):
        following = torch.arange(step, step + owners, dtype=torch.int32)
        board.refresh()
        board.look_ahead(following)
        for pool, own in zip(made, alone, strict=True):
            own.look_ahead(torch.nn.functional.pad(following, (0, 6 - owners)))
            assert torch.equal(pool.visible, own.visible)
            assert torch.equal(pool.reusable, own.reusable)
            assert pool.nbytes() == own.nbytes()
        assert board.room(owners)[1].tolist() == [pool.visible[:owners].tolist() for pool in made]
        made[0].take({1: 2})
        alone[0].take({1: 2})
        made[1].trim(exactly=True)
        alone[1].trim(exactly=True)
