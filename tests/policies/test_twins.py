"""Every policy against its brute-force twin: the same kept sets, the same logits, over random everything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine import run_case
from hypothesis import HealthCheck, assume, given, settings

from evictbench.policies.full import Full
from evictbench.policies.h2o import H2O
from evictbench.policies.random import Random, priority
from evictbench.policies.snapkv import SnapKV
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policies.tova import TOVA
from evictbench.policy import ModelShape, Policy
from twin.cases import Case, cases

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Full, Random, StreamingLLM, TOVA, H2O, SnapKV)}
EXACT = 1e-9
"""Scores closer than this may be ordered either way."""


def check(case: Case, policy: Policy, exact: float = EXACT) -> None:
    if not isinstance(case.budget, int):
        case = replace(case, charged=policy.charged_state(ModelShape.of(case.model().config)))
        assume(case.budget is None or 32 - case.charged >= max(1, case.rule.least_budget))
    twin = case.trace()
    assume(twin.closest >= exact)
    ours = run_case(case, policy)
    assert ours.tokens[: len(twin.tokens)] == list(twin.tokens)
    compared = 0
    for seen, kept in ours.kept.items():
        if seen in twin.kept:
            compared += 1
            for head, positions in kept.items():
                assert positions == sorted(twin.kept[seen][head]), (seen, head)
    assert compared
    for position, logits in ours.logits.items():
        torch.testing.assert_close(logits, twin.logits[position], atol=1e-9, rtol=0)


@pytest.mark.engine
@pytest.mark.parametrize("name", POLICIES)
def test_policy_equals_its_twin(name: str) -> None:
    strategy = cases(name, priority=priority) if name == "random" else cases(name)

    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=strategy)
    def run(case: Case) -> None:
        cls = POLICIES[name]
        check(case, cls(cls.Config(**case.settings)))

    run()
