"""IndexMem++ against its twin: the same logits, kept positions, centroids and occupancy, over random everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from indexmem_cases import Case, cases
from indexmem_engine import check
from twin_comparison import examples


@pytest.mark.engine
@examples(30)
@given(case=cases())
def test_policy_equals_its_twin(case: Case) -> None:
    check(case)
