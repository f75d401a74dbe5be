"""Head budgets by retained mass: against two definitions of them, and what holds whatever the masses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from twin_comparison import assert_found, examples

from evictbench.errors import UserError
from evictbench.policies.indexmem_pp import allocation
from evictbench.policies.indexmem_pp.allocation import read_table
from evictbench.policy import ModelShape
from twin.indexmem_pp import divide_by_mass, fill_by_mass

Allocate = Callable[..., Tensor]

mass_budgets: Allocate = allocation.mass_budgets
table_budgets: Allocate = allocation.table_budgets


def some(heads: int, slots: int, seed: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Masses, what they are ranked by, and what stays, of heads that look differently far."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((heads, slots), generator=generator, dtype=torch.float64)
    mass = (logits * (spread * torch.rand((heads, 1), generator=generator, dtype=torch.float64) + 0.2)).softmax(-1)
    scores = torch.randn((heads, slots), generator=generator)
    kept = torch.rand((heads, slots), generator=generator) < torch.rand(heads, 1, generator=generator)
    return mass, scores, kept


def lists(mass: Tensor, scores: Tensor, kept: Tensor) -> tuple[list[list[float]], list[float]]:
    """The masses of what competes, best first, and the mass of what stays, by head."""
    masses, pinned = [], []
    for m, w, k in zip(mass.tolist(), scores.tolist(), kept.tolist(), strict=True):
        free = sorted((slot for slot in range(len(m)) if not k[slot]), key=lambda slot: (-w[slot], slot))
        masses.append([m[slot] for slot in free])
        pinned.append(sum(m[slot] for slot in range(len(m)) if k[slot]))
    return masses, pinned


sizes = given(
    heads=st.integers(1, 5),
    slots=st.integers(1, 40),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    share=st.floats(0, 1),
    floor=st.integers(0, 6),
)


def check(allocate: Allocate, heads: int, slots: int, seed: int, spread: float, share: float, floor: int) -> None:
    mass, scores, kept = some(heads, slots, seed, spread)
    masses, pinned = lists(mass, scores, kept)
    has = [len(head) for head in masses]
    total = int(share * sum(has))
    floor = min(floor, total // heads)
    found = allocate(mass, scores, kept, total=total, floor=floor)
    assert found.dtype == torch.int64
    assert found.tolist() == fill_by_mass(masses, pinned, total, [floor] * heads)


@pytest.mark.engine
@examples(100)
@sizes
def test_budgets_equal_their_definition(
    heads: int, slots: int, seed: int, spread: float, share: float, floor: int
) -> None:
    check(mass_budgets, heads, slots, seed, spread, share, floor)


@examples(50)
@sizes
def test_it_is_one_mass_that_all_retain(
    heads: int, slots: int, seed: int, spread: float, share: float, floor: int
) -> None:
    masses, pinned = lists(*some(heads, slots, seed, spread))
    least = min(map(len, masses))
    total = int(share * sum(map(len, masses)))
    # As where a prompt is divided: every head has its share and one entry more to choose from.
    floor = min(floor, total // heads, least - 1)
    assume(least > 0)
    assume(total - floor * heads > heads)
    assert divide_by_mass(masses, pinned, total, floor) == fill_by_mass(masses, pinned, total, [floor + 1] * heads)


@examples(50)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, 0.0, 0.125, 0.25, 1e-30]), min_size=6, max_size=6), min_size=1, max_size=4
    ),
    kept=st.integers(0, 2**24 - 1),
    total=st.integers(0, 30),
    floor=st.integers(0, 8),
)
def test_sums_floors_and_bounds_hold_with_ties_and_zeros(
    rows: list[list[float]], kept: int, total: int, floor: int
) -> None:
    mass = torch.tensor(rows)
    heads = len(rows)
    stays = torch.tensor([[bool(kept >> (6 * head + slot) & 1) for slot in range(6)] for head in range(heads)])
    found = mass_budgets(mass, torch.zeros_like(mass), stays, total=total, floor=floor)
    has = (~stays).sum(-1)
    assert int(found.sum()) == min(total, int(has.sum()))
    assert bool((found >= 0).all())
    assert bool((found <= has).all())
    assert bool((found >= has.clamp(max=min(floor, min(total, int(has.sum())) // heads))).all())


def test_nothing_to_divide_is_uniform() -> None:
    mass, scores = torch.zeros(4, 10), torch.zeros(4, 10)
    mass[:, 0] = 1
    kept = torch.zeros(4, 10, dtype=torch.bool)
    kept[:, 0] = True
    assert mass_budgets(mass, scores, kept, total=12, floor=1).tolist() == [3, 3, 3, 3]
    assert sorted(mass_budgets(mass, scores, kept, total=14, floor=1).tolist()) == [3, 3, 4, 4]
    assert mass_budgets(mass, scores, kept, total=0, floor=1).tolist() == [0, 0, 0, 0]
    everything = torch.ones(4, 10, dtype=torch.bool)
    assert mass_budgets(mass, scores, everything, total=5, floor=1).tolist() == [0, 0, 0, 0]
    one_has_none = kept.clone()
    one_has_none[2] = True
    assert mass_budgets(mass, scores, one_has_none, total=9, floor=1).tolist() == [3, 3, 0, 3]


def test_tables() -> None:
    # A table of budgets is taken as it stands, and one of another sum in proportion.
    for table in ([26.0, 54.0], [13.0, 27.0]):
        assert table_budgets(torch.tensor(table), places=30, protected=10, floor=0).tolist() == [16, 44]
    assert table_budgets(torch.tensor([12.0, 68.0]), places=30, protected=10, floor=6).tolist() == [6, 54]
    for places in range(1, 20):
        for floor in range(min(places, 5)):
            found = table_budgets(torch.tensor([0.2, 0.3, 0.5]), places=places, protected=7, floor=floor)
            assert int(found.sum()) == 3 * places
            assert int(found.min()) >= floor
    shape = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=16)
    assert read_table([[1, 2], [3, 4]], shape, "here").shape == (2, 2)
    for wrong in ([[1, 2]], [[1, -2], [3, 4]], [[0, 0], [1, 1]], "words"):
        with pytest.raises(UserError, match="The table of head budgets in here is not"):
            read_table(wrong, shape, "here")


def uniform(mass: Tensor, scores: Tensor, kept: Tensor, *, total: int, floor: int) -> Tensor:
    return mass_budgets(torch.zeros_like(mass), scores, kept, total=total, floor=floor)


def by_share(mass: Tensor, scores: Tensor, kept: Tensor, *, total: int, floor: int) -> Tensor:
    """Places in proportion to the mass that competes."""
    share = (mass * ~kept).sum(-1)
    return (share / share.sum().clamp(min=1e-9) * total).long()


def nothing_pinned(mass: Tensor, scores: Tensor, kept: Tensor, *, total: int, floor: int) -> Tensor:
    return mass_budgets(mass.masked_fill(kept, 0), scores, kept, total=total, floor=floor)


def by_mass_itself(mass: Tensor, scores: Tensor, kept: Tensor, *, total: int, floor: int) -> Tensor:
    return mass_budgets(mass, mass, kept, total=total, floor=floor)


def no_floor(mass: Tensor, scores: Tensor, kept: Tensor, *, total: int, floor: int) -> Tensor:
    return mass_budgets(mass, scores, kept, total=total, floor=0)


@pytest.mark.parametrize("wrong", [uniform, by_share, nothing_pinned, by_mass_itself, no_floor])
def test_a_wrong_allocation_is_found(wrong: Allocate) -> None:
    def run(heads: int, slots: int, seed: int, spread: float, share: float, floor: int) -> None:
        check(wrong, heads, slots, seed, spread, share, floor)

    assert_found(run, sizes, 40)
