"""IndexMem++'s twin by itself: worked examples, and what holds whatever the case."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from indexmem_cases import Case, cases, told

from twin.indexmem_pp import (
    Centroid,
    Pool,
    absorb,
    divide_by_mass,
    expiry,
    fill_by_mass,
    least_share,
    lloyd,
    means,
    ranked,
    score_and_rate,
)
from twin.indexmem_pp_run import Rules
from twin.model import dense_forward

quick = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def pools(pool: Pool, length: int) -> list[list[int]]:
    found = []
    for q in range(length):
        pool.turn(q)
        found.append(sorted(pool.held))
    return found


def test_one_in_one_out_by_hand() -> None:
    scores, rates = [9.0, 1.0, 3.0, 2.0, 2.0, 0.0, 5.0, 0.0], [0.0] * 8
    held = pools(Pool(scores, rates, sinks=1, window=2, places=2), 8)
    # 1 and 2 join at 3 and 4, then 3 beats 1, then 4 equals 3 and is later, then 5 is worst.
    assert held == [[], [], [], [1], [1, 2], [2, 3], [2, 3], [2, 3]]
    assert expiry(held, 1, 2) == [math.inf, 5, math.inf, math.inf, 6, 7, math.inf, math.inf]


def test_what_fades_loses_its_place_later() -> None:
    scores, rates = [4.0, 1.0, 1.5, 0.0], [-16384.0, 0.0, 0.0, 0.0]
    assert [ranked(scores, rates, q, [0, 1, 2])[0] for q in (2, 3)] == [0, 2]
    assert pools(Pool(scores, rates, 0, 1, 1), 4) == [[], [0], [0], [2]]


def test_what_went_does_not_come_back() -> None:
    # 1 would be the better of the two from query 5 on, but it went at query 2.
    scores, rates = [4.0, 3.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [-2048.0] + [0.0] * 8
    held = pools(Pool(scores, rates, 0, 1, 1), 9)
    assert ranked(scores, rates, 8, [0, 1])[0] == 1
    assert all(1 not in one for one in held[2:])


def test_places_go_where_least_is_retained() -> None:
    assert fill_by_mass([[0.5, 0.2, 0.1], [0.1, 0.1, 0.1]], [0.2, 0.4], 4, [0, 0]) == [1, 3]
    assert fill_by_mass([[0.5, 0.2, 0.1], [0.1, 0.1, 0.1]], [0.2, 0.4], 4, [2, 2]) == [2, 2]
    assert fill_by_mass([[0.5], [0.1, 0.1, 0.1]], [0.0, 0.7], 3, [0, 0]) == [1, 2]
    assert fill_by_mass([[], [0.1, 0.1]], [1.0, 0.8], 2, [1, 1]) == [0, 2]
    # The same by the search; each has one more than its floor at least.
    assert divide_by_mass([[0.5, 0.2, 0.1], [0.1, 0.1, 0.1]], [0.2, 0.4], 4, 0) == [1, 3]
    assert divide_by_mass([[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]], [0.7, 0.1], 4, 0) == [1, 3]
    assert divide_by_mass([[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]], [0.7, 0.1], 4, 1) == [2, 2]
    # A quarter of the budget, half of what is not protected, the centroids.
    assert [least_share(2048, 1916, 64, None), least_share(512, 380, 64, None), least_share(40, 20, 2, None)] == [
        512,
        128,
        10,
    ]
    assert [least_share(40, 30, 6, 0), least_share(40, 30, 6, 9), least_share(40, 30, 6, 99)] == [6, 9, 30]


def test_clusters_and_running_means() -> None:
    keys = torch.tensor([[0.0], [1.0], [10.0], [12.0]], dtype=torch.float64)
    assert lloyd(keys, [0, 1]) == [0, 0, 1, 1]
    found = means(keys, -keys, lloyd(keys, [0, 1]))
    assert [(float(c.key), float(c.value), c.count) for c in found] == [(0.5, -0.5, 2), (11.0, -11.0, 2)]
    one_by_one: list[Centroid] = []
    for key in keys[[0, 2, 1, 3]]:
        absorb(one_by_one, 2, key, -key)
    assert [(float(c.key), c.count) for c in one_by_one] == [(0.5, 2), (11.0, 2)]


def test_a_fresh_scorer_falls_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "input_norm.weight": torch.ones(6),
        "input_norm.bias": torch.zeros(6),
        "narrow.weight": torch.randn((4, 6), generator=generator),
        "width_norm.weight": torch.ones(4),
        "width_norm.bias": torch.zeros(4),
        "to_score.weight": torch.zeros(2, 4),
        "to_rate.weight": torch.zeros(2, 4),
        "to_rate.bias": torch.full((2,), math.log(math.e - 1)),
    }
    weights = {name: tensor.double() for name, tensor in weights.items()}
    score, rate = score_and_rate(weights, torch.randn(6, generator=generator).double(), 1000, 1)
    assert (score, rate) == pytest.approx((1e-3, -1))


@quick
@given(case=cases())
def test_counts_and_places(case: Case) -> None:
    rules, twin = case.rules, told(case)
    assert bool(torch.isfinite(twin.logits).all())
    heads = case.kv_heads
    for layer in range(2):
        places = [twin.places[layer, head] for head in range(heads)]
        assert sum(places) == heads * rules.places
        assert min(places) >= 0
    for q, by_head in enumerate(twin.seen):
        for at, seen in by_head.items():
            protected = {j for j in range(q + 1) if j < rules.sinks or j > q - rules.window}
            assert protected <= set(seen)
            if q >= case.context:
                grown = rules.at(q + 1) - rules.at(0)
                assert len(seen) <= rules.sinks + rules.window + twin.places[at] + grown
        if q >= case.context:
            mean = sum(map(len, by_head.values())) / len(by_head) + rules.slots
            assert mean <= rules.at(q + 1)
            if rules.slots and q >= case.context:
                for at, seen in by_head.items():
                    assert sum(twin.counts[q][at]) == q + 1 - len(seen)
                    assert len(twin.counts[q][at]) <= rules.slots


@quick
@given(case=cases())
def test_room_for_all_is_the_full_model(case: Case) -> None:
    least = case.rules.sinks + case.rules.window + 1
    case = replace(case, rules=replace(case.rules, budget=max(case.length, least) + case.seed % 3))
    torch.testing.assert_close(told(case).logits, dense_forward(case.model(), case.tokens).logits, atol=1e-9, rtol=0)


@quick
@given(case=cases(prefill=("dense",), centroids=(60,)), places=st.integers(1, 5))
def test_a_centroid_for_each_evicted_entry_is_the_full_model(case: Case, places: int) -> None:
    full = dense_forward(case.model(), case.tokens).logits
    rules = replace(case.rules, budget=case.rules.sinks + case.rules.window + places + 60)
    torch.testing.assert_close(told(replace(case, rules=rules)).logits, full, atol=1e-9, rtol=0)
    none = told(replace(case, rules=replace(rules, centroids=0, budget=rules.places + rules.sinks + rules.window)))
    if any(len(seen) <= q for q, by_head in enumerate(none.seen) for seen in by_head.values()):
        assert not torch.allclose(none.logits, full, atol=1e-9, rtol=0)


@quick
@given(case=cases(prefill=("native", "bounded"), prompt=("equal_share",), centroids=(0, 2), approximate=False))
def test_parts_of_the_context_change_nothing(case: Case) -> None:
    twin, whole = told(case), told(replace(case, chunk=case.context))
    torch.testing.assert_close(twin.logits, whole.logits, atol=1e-12, rtol=0)
    assert twin.seen == whole.seen


def test_uniform_and_mass_differ() -> None:
    rules = Rules(context=30, budget=10, sinks=1, window=2)
    case = Case(rules, "llama", 3, 2, 2, 40, 0, 30, "spread")
    assert len(set(told(case).places.values())) > 1
    assert set(told(replace(case, rules=replace(rules, budgets="uniform"))).places.values()) == {7}
