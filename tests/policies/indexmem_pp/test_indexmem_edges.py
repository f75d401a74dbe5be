"""IndexMem++ at its edges: everything fits, nothing to evict, nothing to choose between, more centroids than went."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from indexmem_cases import Case, cases
from indexmem_engine import ToldScores, cache_of, check, counts, policy_of, twin_of
from torch import Tensor
from twin_comparison import examples, forward, kept

from evictbench.cache.new_cache import new_cache
from evictbench.cache.paged.head_budget import HeadBudgetCache
from evictbench.errors import UserError
from evictbench.policies.indexmem_pp import IndexMem, Settings
from evictbench.policy import HeadBudgets
from twin.indexmem_pp_run import Rules, Run
from twin.model import dense_forward

quick = examples(12)


def run(case: Case, cls: type[ToldScores] = ToldScores) -> tuple[Tensor, HeadBudgetCache]:
    cache = cache_of(case, policy_of(case, cls))
    return torch.cat([forward(case.model(), cache, case.tokens[begin:end]) for begin, end in case.parts]), cache


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=0)


def plain(length: int = 60, question: int = 3, **rules: Any) -> Case:
    """40 tokens of context, if no rule says otherwise."""
    named = Rules(**{"context": 40, "budget": 14, "sinks": 2, "window": 4, **rules})
    return Case(named, "llama", 1, 2, 2, length, question, 16, "spread")


@pytest.mark.engine
@quick
@given(case=cases(), more=st.integers(0, 3), share=st.booleans())
def test_a_budget_of_everything_is_the_full_cache(case: Case, more: int, share: bool) -> None:
    rules = case.rules
    budget = 1.0 if share else max(case.length, rules.sinks + rules.window + 1) + more
    found, cache = run(replace(case, rules=replace(rules, budget=budget)))
    near(found, dense_forward(case.model(), case.tokens).logits)
    assert cache.nbytes() == cache.bytes_held


@pytest.mark.engine
@quick
@given(case=cases(prefill=("dense",)), places=st.integers(1, 6))
def test_a_centroid_for_each_evicted_entry_is_the_full_cache(case: Case, places: int) -> None:
    rules = replace(case.rules, centroids=60, budget=case.rules.sinks + case.rules.window + places + 60)
    found, cache = run(replace(case, rules=rules))
    near(found, dense_forward(case.model(), case.tokens).logits)
    # And they were: entries that went and came back as means of one.
    went = case.length + 1 - rules.sinks - rules.window - places
    for layer in range(2):
        made = [len(counts(cache, layer, head)) for head in range(case.kv_heads)]
        assert sum(made) == case.kv_heads * max(0, went)
        assert all(count == 1 for head in range(case.kv_heads) for count in counts(cache, layer, head))


@pytest.mark.parametrize("prefill", ["native", "dense", "bounded"])
@pytest.mark.parametrize("context", [1, 3, 5, 6, 7])
def test_a_context_with_nothing_to_evict(prefill: Any, context: int) -> None:
    """Sinks 2 and window 4: the first that competes comes with the seventh token."""
    for budget in (7, 9):
        check(plain(16, 2, prefill=prefill, context=context, budget=budget, centroids=1))


@pytest.mark.parametrize("prefill", ["native", "dense", "bounded"])
def test_of_equals_the_first_ones_stay(prefill: Any) -> None:
    case = replace(plain(prefill=prefill, budgets="uniform"), scores="equal")
    _, cache = run(case)
    for layer in range(2):
        for head in range(2):
            assert kept(cache, layer, head) == [*range(10), 57, 58, 59]


class OneKeepsAll(ToldScores):
    """The first head keeps all it can, the second has what is left."""

    def head_budgets(self, budgets: HeadBudgets) -> Tensor:
        all_there_is = int(budgets.competes[0].sum()) + budgets.centroids
        return torch.tensor([all_there_is, 2 * budgets.places - all_there_is])


class OneKeepsAllToo(Run):
    def allocate(self, layer: int, masses: list[list[float]], pinned: list[float]) -> list[int]:
        all_there_is = len(masses[0]) + self.rules.slots
        return [all_there_is, 2 * self.rules.share - all_there_is]


@pytest.mark.parametrize("centroids", [0, 3])
def test_a_head_that_evicts_nothing_beside_one_that_does(centroids: int) -> None:
    # Of 20 tokens 14 compete, and a pool has 8 places.
    case = plain(context=20, budget=14 + centroids, centroids=centroids)
    check(case, OneKeepsAll, OneKeepsAllToo)
    twin = twin_of(case, OneKeepsAllToo)
    assert twin.places[0, 0] == 14
    assert twin.counts[20][0, 0] == [1] * min(1, centroids)
    assert sum(twin.counts[20][0, 1]) == (13 if centroids else 0)


@pytest.mark.parametrize("prefill", ["native", "dense", "bounded"])
def test_more_centroids_than_went(prefill: Any) -> None:
    case = plain(prefill=prefill, context=17, budget=20, centroids=12)
    check(case)
    twin = twin_of(case)
    assert twin.counts[17][0, 0] == [1] * 10
    assert len(twin.counts[59][0, 0]) == 12


def test_centroids_that_leave_no_place() -> None:
    for budget, slots in ((7, 0), (8, 0), (9, 1), (15, 4), (18, 5), (19, 12)):
        case = plain(45, budget=budget, centroids=12)
        assert policy_of(case).centroids(budget) == case.rules.slots == slots
        check(case)


def test_a_budget_that_grows() -> None:
    for share in (0.5, 0.8):
        case = replace(plain(budget=share, centroids=2), length=90)
        check(case)
        assert case.rules.at(90) > case.rules.at(40)


def test_impossible_budgets_are_refused() -> None:
    case = plain()
    for budget in (1, 6):
        with pytest.raises(UserError, match="at least 7"):
            run(replace(case, rules=replace(case.rules, budget=budget)))
    run(replace(case, rules=replace(case.rules, budget=7)))


class TooMuch(ToldScores):
    def head_budgets(self, budgets: HeadBudgets) -> Tensor:
        """One more than there are in every layer but the first, whose division the engine checks."""
        shares: Tensor = super().head_budgets(budgets)
        return shares + 2 * (budgets.layer > 0)


@pytest.mark.parametrize("centroids", [0, 2])
def test_more_than_the_budget_is_an_error(centroids: int) -> None:
    with pytest.raises(RuntimeError, match="the budget is 14"):
        run(plain(centroids=centroids), TooMuch)


def test_shares_of_a_table() -> None:
    case = plain(budget=16, centroids=2)
    policy = policy_of(case)
    policy.config = replace(policy.config, budgets="table", floor=1)
    policy._table = torch.tensor([[13.0, 19.0], [1.0, 0.0]])
    cache = cache_of(case, policy)
    for begin, end in case.parts:
        forward(case.model(), cache, case.tokens[begin:end])
    for layer, places in enumerate(([5, 11], [16, 0])):
        held = [len(kept(cache, layer, head)) for head in range(2)]
        # The next query's own entry is one of the window's four.
        assert held == [2 + 3 + count for count in places]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_stay_numbers(tiny_llama: Any, dtype: torch.dtype) -> None:
    model = tiny_llama(seed=3).to(dtype)
    for rules in ({"centroids": 0}, {"centroids": 3}, {"centroids": 20, "budget": 30}, {"budget": 7}):
        for prefill in ("native", "dense", "bounded"):
            case = plain(prefill=prefill, **rules)
            policy = policy_of(case)
            cache = new_cache(model, policy, case.rules.budget, prefill=prefill, prompt_length=case.context)
            for begin, end in case.parts:
                assert bool(torch.isfinite(forward(model, cache, case.tokens[begin:end])).all())
            assert cache.nbytes() == cache.bytes_held


def test_of_a_long_decode_nothing_is_lost() -> None:
    """Pages fill and change hands: what is seen is what the twin says to the end."""
    rules = Rules(context=120, budget=70, sinks=4, window=16, centroids=18)
    check(Case(rules, "llama", 5, 4, 1, 190, 7, 50, "spread"))


def test_settings_and_what_they_come_to() -> None:
    for wrong in ({"sinks": -1}, {"window": 0}, {"centroids": -1}, {"floor": -1}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            Settings(**wrong)  # type: ignore[arg-type]
    policy = IndexMem()
    assert (policy.sinks, policy.window, policy.centroids(2048)) == (4, 128, 64)
