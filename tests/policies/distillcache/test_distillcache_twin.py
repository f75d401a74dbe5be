"""DistillCache against its brute-force twin: the same features, the same kept sets, the same logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_distillcache_weights import policy_of, tensors
from twin_comparison import check, examples, run_case

from evictbench.policies.distillcache import DistillCache
from evictbench.policies.distillcache.network import Ranker
from evictbench.policy import Step
from twin import distillcache as twin
from twin.cases import Case
from twin.distillcache import distillcache_cases
from twin.simulate import simulate
from twin.tiny import random_tokens, tiny_model

ROUNDING = 1e-4
"""Features and scores are float32 and scores spread over units: closer ones may be ordered either way."""


@pytest.mark.engine
@examples(50)
@given(case=distillcache_cases())
def test_policy_equals_its_twin(case: Case) -> None:
    check(case, policy_of(case), exact=ROUNDING)


@examples(8)
@given(case=distillcache_cases(long=True))
def test_policy_equals_its_twin_where_the_ring_is_full(case: Case) -> None:
    check(case, policy_of(case), exact=ROUNDING)


class Showing(DistillCache):
    """Keeps the features of every pass that evicted."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.shown: dict[int, dict[int, list[float]]] = {}

    def score(self, step: Step) -> Any:
        following = int(step.query_positions[0, -1]) + 1
        numbers = self.features(step)[0].tolist()
        places = step.positions[0, 0].tolist()
        self.shown[following] = {place: five for place, five in zip(places, numbers, strict=True) if place >= 0}
        return super().score(step)


@examples(20)
@given(case=st.one_of(distillcache_cases(), distillcache_cases(long=True)))
def test_features_equal_the_loops(case: Case) -> None:
    compare_features(case)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_features_equal_the_loops_at_every_stage(kind: Any) -> None:
    """At the prompt, at a question and at decode steps, dozens of entries each."""
    prompt = tuple(random_tokens(60))
    case = Case(twin.DistillCache(), kind, 0, 2, 2, 2, False, False, prompt, 10, 0.6, "bounded", 8, 45)
    compared = compare_features(case)
    assert all(compared[stage] > 40 for stage in ("prompt", "question", "decode")), compared


def compare_features(case: Case, cls: type[Showing] = Showing) -> dict[str, int]:
    """How many entries of a case were compared, by the stage after which they were ranked."""
    compared: dict[str, int] = {}
    wanted: dict[int, dict[int, list[float]]] = {}

    class Watching(twin.DistillCache):
        def select(self, record: Any, held: tuple[int, ...], queries: range, count: int) -> Any:
            wanted[queries.stop] = twin.features(record, list(held), queries)
            return super().select(record, held, queries, count)

    case = replace(case, rule=Watching(**vars(case.rule)))
    simulated, policy = case.trace(), policy_of(case, cls)
    ours = run_case(case, policy)
    assert isinstance(policy, Showing)
    end = case.border or len(case.prompt)
    for seen in sorted(wanted):
        assert sorted(policy.shown[seen]) == sorted(wanted[seen])
        for token, five in wanted[seen].items():
            assert policy.shown[seen][token] == pytest.approx(five, rel=1e-4, abs=1e-7), (seen, token)
        stage = "prompt" if seen <= end else "question" if seen <= len(case.prompt) else "decode"
        compared[stage] = compared.get(stage, 0) + len(wanted[seen])
        if ours.kept[seen] != simulated.kept[seen]:
            break  # scores too close to call; what follows is of another text
    return compared


def test_the_ranker_is_the_loops() -> None:
    numbers = torch.rand(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    numbers[:, 0] *= 0.1
    numbers[:, 2] *= 1e-3
    numbers[0] = 0
    for seed in range(5):
        exact = twin.random_ranker(seed)
        ranker = Ranker()
        ranker.load_state_dict({name: tensor.float() for name, tensor in tensors(exact).items()})
        found = ranker.double()(numbers)
        wanted = torch.tensor([exact.score(five) for five in numbers.tolist()], dtype=torch.float64)
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=0)


def test_the_cache_read_to_the_letter_collapses() -> None:
    """Algorithm 1's |C| is what is left of the cache: with r = .75 it falls to 32 in a few steps, whatever was seen;
    a share of the tokens seen does not."""
    model, prompt, new = tiny_model(), random_tokens(120), random_tokens(8, 1)
    sizes = {}
    for length in ("seen", "cache"):
        rule = twin.DistillCache(length=length)  # type: ignore[arg-type]
        trace = simulate(model, rule, prompt, new, 0.75, chunk=200)
        case = Case(rule, "llama", 0, 2, 2, 2, False, False, tuple(prompt), tuple(new), 0.75, "native", 200, None)
        ours = run_case(case, policy_of(case))
        sizes[length] = [len(ours.kept[seen][0, 0]) for seen in range(120, 129)]
        assert sizes[length] == [len(trace.kept[seen][0, 0]) for seen in range(120, 129)]
    assert sizes["seen"] == [(seen + 1) * 3 // 4 - 1 for seen in range(120, 129)]
    letter = [120 * 3 // 4 - 1]
    for _ in range(8):
        letter.append(max(32, (letter[-1] + 1) * 3 // 4) - 1)
    assert sizes["cache"] == letter
    assert letter[-1] == 31
