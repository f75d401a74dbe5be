"""Paired tests against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from studies.paired import paired


def test_right_or_wrong_scores_are_tested_as_mcnemar_does() -> None:
    first = dict.fromkeys(range(12), 1.0)
    second = {key: 0.0 if key < 8 else 1.0 for key in range(12)} | {99: 1.0}
    found = paired(first, second)
    assert (found.count, found.wins, found.losses) == (12, 8, 0)
    assert found.sign_test == pytest.approx(2 * 0.5**8)
    assert found.mean == pytest.approx(8 / 12)


def test_the_t_test_is_over_differences() -> None:
    found = paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    # t = 2 / (1 / sqrt 3) with two degrees of freedom, whose distribution function is known in closed form.
    t = 2 * math.sqrt(3)
    assert found.t_test == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert found.interval is not None
    assert found.interval[0] < 0 < found.interval[1]


def test_what_does_not_differ_proves_nothing() -> None:
    found = paired({0: 0.5, 1: 0.25}, {0: 0.5, 1: 0.25})
    assert (found.t_test, found.sign_test, found.mean) == (1.0, 1.0, 0.0)


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(ValueError, match="no sample"):
        paired({0: 1.0}, {1: 1.0})
