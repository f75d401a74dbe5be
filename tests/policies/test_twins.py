"""Every policy against its brute-force twin: the same kept sets, the same logits, over random everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from twin_comparison import check, examples

from evictbench.policies.full import Full
from evictbench.policies.h2o import H2O
from evictbench.policies.random import Random, priority
from evictbench.policies.snapkv import SnapKV
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policies.tova import TOVA
from evictbench.policy import Policy
from twin.cases import Case, cases

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Full, Random, StreamingLLM, TOVA, H2O, SnapKV)}


@pytest.mark.engine
@pytest.mark.parametrize("name", POLICIES)
def test_policy_equals_its_twin(name: str) -> None:
    strategy = cases(name, priority=priority) if name == "random" else cases(name)

    @examples(120)
    @given(case=strategy)
    def run(case: Case) -> None:
        cls = POLICIES[name]
        check(case, cls(cls.Config(**case.settings)))

    run()
