"""Power: published and hand-worked cases, and against the tests themselves."""

import math

import numpy as np
import pytest
from scipy.stats import binom
from statsmodels.stats.power import ttest_power

from evictbench.stats.paired import Difference
from evictbench.stats.power import (
    DISCORDANT,
    documents_needed,
    effective_documents,
    in_words,
    right_wrong_needed,
    right_wrong_power,
    smallest_before_a_run,
    smallest_difference,
    smallest_right_wrong,
)


def apart(values):
    return Difference(float(np.mean(values)), None, None, len(values), (tuple(values),))


@pytest.mark.parametrize(("effect", "documents"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_documents_of_a_paired_t_test_as_in_tables(effect, documents):
    """Cohen's small, medium and large effect at 80% power, two-sided 5%."""
    assert documents_needed(effect, 1.0) == documents
    assert smallest_difference(documents, 1.0) <= effect < smallest_difference(documents - 1, 1.0)
    assert documents_needed(-0.3 * effect, 0.3) == documents


def test_a_difference_scales_with_the_spread_and_one_side_asks_for_less():
    assert smallest_difference(60, 0.2) == pytest.approx(smallest_difference(60, 1.0) / 5)
    assert smallest_difference(60, 1.0, one_sided=True) < smallest_difference(60, 1.0)
    assert smallest_difference(60, 1.0, alpha=0.01) > smallest_difference(60, 1.0)
    assert smallest_difference(60, 1.0, power=0.9) > smallest_difference(60, 1.0)


@pytest.mark.parametrize("documents", [2, 5, 60, 5000])
@pytest.mark.parametrize("one_sided", [False, True])
def test_it_is_what_statsmodels_finds_at_any_level(documents, one_sided):
    sizes = [smallest_difference(documents, 1.0, alpha=alpha, one_sided=one_sided) for alpha in (0.05, 0.01, 4e-5)]
    assert sizes == sorted(sizes)
    for alpha, size in zip((0.05, 0.01, 4e-5), sizes, strict=True):
        found = ttest_power(size, documents, alpha if one_sided else alpha / 2, alternative="larger")
        assert found == pytest.approx(0.8, abs=1e-4)


def test_what_cannot_be_found():
    assert smallest_difference(1, 0.3) == math.inf
    assert smallest_difference(9, 0.0) == 0.0
    assert documents_needed(0.0, 0.3) is None
    assert right_wrong_needed(0.0, 0.3) is None
    assert documents_needed(1e-7, 0.3) is None
    # Five of five on one side: p is 2 / 32, which is more than 5%.
    assert smallest_right_wrong(5, 0.1) == math.inf
    with pytest.raises(ValueError, match="a share"):
        smallest_right_wrong(5, 1.5)


def test_right_or_wrong_by_hand():
    """Six documents that all differ: only six of six on one side is significant, ((1 + d) / 2)^6 of the time."""
    assert smallest_right_wrong(6, 1.0) == pytest.approx(2 * 0.8 ** (1 / 6) - 1, abs=1e-5)
    assert right_wrong_power(0.5, 6, 1.0) == pytest.approx(0.75**6)
    assert right_wrong_needed(0.99, 1.0) == 6


@pytest.mark.parametrize(("difference", "documents", "differ"), [(0.15, 60, 0.2), (0.1, 100, 0.3), (0.3, 25, 0.1)])
def test_power_is_what_the_test_of_two_runs_has(difference, documents, differ):
    """Every outcome weighed, and the sign-flip test asked."""
    gains, losses = (max(differ, difference) + difference) / 2, (max(differ, difference) - difference) / 2
    found = 0.0
    for won in range(documents + 1):
        for lost in range(documents - won + 1):
            weight = binom.pmf(won, documents, gains)
            weight *= binom.pmf(lost, documents - won, losses / (1 - gains))
            if weight > 1e-5 and won > lost:
                values = [1.0] * won + [-1.0] * lost + [0.0] * (documents - won - lost)
                found += weight * (apart(values).p_value() < 0.05)
    assert right_wrong_power(difference, documents, differ) == pytest.approx(found, abs=2e-3)


def test_the_smallest_difference_is_found_as_often_as_said():
    dice, documents, hits, runs = np.random.default_rng(4), 40, 0, 300
    smallest = smallest_difference(documents, 0.3)
    for _ in range(runs):
        hits += apart(dice.normal(smallest, 0.3, documents).tolist()).p_value() < 0.05
    assert hits / runs == pytest.approx(0.8, abs=0.06)


def test_a_gates_smallest_drop_is_found_as_often_as_said():
    """Above its tolerance, by p_below; right-or-wrong scores of which a fifth differ."""
    dice, documents, hits, runs = np.random.default_rng(5), 150, 0, 300
    drop = 0.02 + smallest_difference(documents, math.sqrt(0.2), one_sided=True)
    for _ in range(runs):
        values = dice.choice([-1.0, 0.0, 1.0], documents, p=[0.1 + drop / 2, 0.8, 0.1 - drop / 2])
        hits += apart(values.tolist()).p_below(0.02) < 0.05
    assert hits / runs == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize(("difference", "differ"), [(0.1, 0.1), (0.05, 0.2), (0.3, 0.4)])
def test_right_or_wrong_documents_are_enough_and_not_many_too_many(difference, differ):
    needed = right_wrong_needed(difference, differ)
    assert right_wrong_power(difference, needed, differ) >= 0.8
    assert right_wrong_power(difference, int(0.95 * needed) - 1, differ) < 0.8
    # Near McNemar's normal approximation, and never below it by more than a step.
    normal = (1.96 * math.sqrt(differ) + 0.8416 * math.sqrt(differ - difference**2)) ** 2 / difference**2
    assert 0.95 * normal - 2 < needed < 1.2 * normal + 8


def test_tasks_of_unequal_size_tell_as_much_as_the_small_ones_let_them():
    assert effective_documents([60] * 4) == 240
    assert effective_documents([100, 10]) == int(4 / (1 / 100 + 1 / 10))


def test_before_a_run_repeats_narrow_it_and_more_documents_too():
    assert smallest_before_a_run([60]) == smallest_right_wrong(60, DISCORDANT)
    assert smallest_before_a_run([30], 16) < smallest_before_a_run([30], 4) < smallest_before_a_run([30])
    assert smallest_before_a_run([500]) < smallest_before_a_run([60])


def test_a_run_says_what_it_cannot_find():
    smallest = smallest_before_a_run([60, 60])
    said = in_words([60, 60], 1, 0.02)
    assert said.startswith(f"differences of the mean over tasks of {100 * smallest:.1f} points and more")
    assert said.endswith("a gate tolerates 2")
    assert in_words([60, 0], 1, 0.02).startswith(f"differences of {100 * smallest_before_a_run([60]):.1f} points")
    assert in_words([4], 1, 0.02).startswith("no difference")
    assert "4.2 points" in in_words([30], 16, 0.02)


def test_and_keeps_silent_where_it_finds_what_a_gate_tolerates():
    assert in_words([60, 60], 1, smallest_before_a_run([60, 60])) == ""
    assert in_words([2500], 1, 0.02) == ""
