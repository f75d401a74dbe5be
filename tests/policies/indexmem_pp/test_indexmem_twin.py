"""IndexMem++ against its twin: the same logits, kept positions, centroids and occupancy, over random everything."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from indexmem_cases import Case, cases
from indexmem_engine import check


@pytest.mark.engine
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_policy_equals_its_twin(case: Case) -> None:
    check(case)
