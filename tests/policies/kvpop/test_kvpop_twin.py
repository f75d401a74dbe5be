"""kvpop and kvpop_mlp against their brute-force twin: the same kept sets, the same logits."""

from __future__ import annotations

import pytest
from hypothesis import given
from random_kvpop_weights import random_fit
from twin_comparison import check, examples

from evictbench.policies.kvpop import KVpop, KVpopMLP
from evictbench.policy import Policy
from twin import kvpop as twin
from twin.cases import Case, cases

ROUNDING = 1e-4
"""Scores are float32 and spread over tens: closer ones may be ordered either way."""


def fitted(case: Case, cls: type[Policy]) -> Policy:
    rule = case.rule
    assert isinstance(rule, twin.KVpop)
    policy = cls(cls.Config(**case.settings))
    return random_fit(
        policy, case.model(), rule.weights_seed, waits_for_recent=rule.waits_for_recent, normed=rule.normed
    )


@pytest.mark.engine
@pytest.mark.parametrize("cls", [KVpop, KVpopMLP])
def test_policy_equals_its_twin(cls: type[Policy]) -> None:
    @examples(80)
    @given(case=cases(cls.name))
    def run(case: Case) -> None:
        check(case, fitted(case, cls), exact=ROUNDING)

    run()
