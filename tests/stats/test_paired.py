"""Differences between two runs: hand-worked cases, and how often their tests raise a false alarm."""

import itertools
from functools import cache
from statistics import fmean

import numpy as np
import pytest
from scipy.stats import binom, t

from evictbench.stats.paired import MOST_OUTCOMES, Difference, difference


def documents(*values, task="a"):
    return {(task, number): float(value) for number, value in enumerate(values)}


def test_a_difference_is_over_the_documents_that_both_have():
    found = difference(documents(1, 0, 1, 1), documents(0, 0, 1))
    values = [1.0, 0.0, 0.0]
    half = t.ppf(0.975, 2) * (sum((v - 1 / 3) ** 2 for v in values) / 2) ** 0.5 / 3**0.5
    assert found.documents == 3
    assert found.value == pytest.approx(1 / 3)
    assert (found.low, found.high) == pytest.approx((1 / 3 - half, 1 / 3 + half))
    assert difference(documents(1), documents(1, task="b")) is None


def test_no_spread_is_no_interval_and_few_documents_are_no_proof():
    found = difference(documents(1, 1), documents(0, 0))
    assert (found.value, found.low, found.high) == (1.0, None, None)
    assert found.p_value() == 0.5
    assert difference(documents(1, 1), documents(1, 1)).p_value() == 1.0


def test_p_is_the_share_of_sign_flips_that_are_as_far_off():
    first = documents(0.9, 0.2, 0.7, 0.4) | documents(0.5, 0.6, task="b")
    second = documents(0.1, 0.3, 0.2, 0.1) | documents(0.5, 0.2, task="b")
    tasks = [[0.8, -0.1, 0.5, 0.3], [0.0, 0.4]]
    found = difference(first, second)
    assert found.value == pytest.approx(fmean(map(fmean, tasks)))

    def far(signs):
        flipped = iter(signs)
        return abs(fmean(fmean(value * next(flipped) for value in task) for task in tasks)) >= abs(found.value) - 1e-9

    share = fmean(far(signs) for signs in itertools.product((1, -1), repeat=6))
    assert found.p_value() == pytest.approx(share)


def test_drawn_signs_come_near_the_exact_share():
    wins = difference(documents(*[1] * 15, *[0] * 5), documents(*[0] * 15, *[1] * 5))
    assert wins.p_value() == pytest.approx(0.0414, abs=0.01)  # the exact two-sided sign test of 15 against 5


def apart(*by_task):
    """Differences by task, as they are."""
    value = fmean(map(fmean, by_task))
    return Difference(value, None, None, sum(map(len, by_task)), tuple(map(tuple, by_task)))


def right_wrong(count, losses, gains):
    return apart([-1.0] * losses + [1.0] * gains + [0.0] * (count - losses - gains))


def test_right_or_wrong_scores_are_tested_as_mcnemar_does():
    found = difference(documents(*[1.0] * 12, 1.0), documents(*[0.0] * 8, *[1.0] * 4))
    assert (found.documents, found.wins, found.losses) == (12, 8, 0)
    assert found.value == pytest.approx(8 / 12)
    assert found.sign_test() == pytest.approx(2 * 0.5**8)
    assert right_wrong(40, 3, 12).sign_test() == pytest.approx(2 * binom.cdf(3, 15, 0.5))
    assert right_wrong(7, 0, 0).sign_test() == 1.0


@pytest.mark.parametrize(("losses", "gains"), [(0, 6), (3, 12), (30, 14), (1, 1)])
def test_of_right_or_wrong_scores_flipping_signs_is_the_sign_test(losses, gains):
    found = right_wrong(200, losses, gains)
    assert found.p_value() == pytest.approx(found.sign_test())


def test_the_sign_test_does_not_mind_how_far_apart_two_documents_are():
    small = apart([-0.01] * 9 + [0.9])
    assert small.value > 0
    assert small.sign_test() == pytest.approx(2 * 11 * 0.5**10)


def test_p_below_a_margin_is_the_share_of_flips_that_are_as_low():
    tasks, margin = [[-0.8, 0.1, -0.5, -0.3], [0.0, -0.4]], 0.05
    found = apart(*tasks)
    sums = [
        fmean(fmean((value + margin) * next(flipped) for value in task) for task in tasks)
        for signs in itertools.product((1, -1), repeat=6)
        for flipped in [iter(signs)]
    ]
    low = found.value + margin
    assert found.p_below(margin) == pytest.approx(fmean(one <= low + 1e-9 for one in sums))


def test_p_below_by_hand():
    assert right_wrong(10, 5, 0).p_below(0) == pytest.approx(0.5**5)
    assert right_wrong(10, 0, 5).p_below(0) == pytest.approx(1.0)
    # All ten lost: of 2^10 flips only this one is as low.
    assert right_wrong(10, 10, 0).p_below(0.02) == pytest.approx(0.5**10)
    # Half a point lost by each is no drop of more than two points.
    assert apart([-0.005] * 30).p_below(0.02) == 1.0
    assert right_wrong(5, 0, 0).p_below(0.0) == 1.0


def test_a_wider_margin_is_harder_to_fall_below():
    found = right_wrong(100, 20, 6)
    p = [found.p_below(margin) for margin in (0.0, 0.02, 0.05, 0.1, 0.2)]
    assert p == sorted(p)
    assert p[0] < 0.01
    assert p[-1] > 0.5


def test_drawn_outcomes_come_near_the_exact_share_for_a_margin_too(monkeypatch):
    found = right_wrong(60, 12, 3)
    exact = found.p_below(0.02)
    monkeypatch.setattr("evictbench.stats.paired.MOST_OUTCOMES", 1)
    assert found.p_below(0.02) == pytest.approx(exact, abs=0.008)
    assert found.p_below(0.02) == found.p_below(0.02)  # the seed is fixed
    assert MOST_OUTCOMES > 61 * 13 * 4


@cache
def _lost_enough(count, gains, margin):
    """The fewest losses at which the gate fails, beside so many gains."""
    low, high = 0, count - gains + 1
    while low < high:
        middle = (low + high) // 2
        if right_wrong(count, middle, gains).p_below(margin) < 0.05:
            high = middle
        else:
            low = middle + 1
    return low


def alarms(count, losses, gains, margin):
    """How often p_below is under 5% where those shares of documents are lost and gained: every outcome, weighed."""
    found = 0.0
    for seen in range(count + 1):
        weight = binom.pmf(seen, count, gains)
        if weight > 1e-5:
            enough = _lost_enough(count, seen, margin)
            found += weight * binom.sf(enough - 1, count - seen, losses / (1 - gains))
    return found


@pytest.mark.parametrize("differ", [0.05, 0.2, 0.4])
@pytest.mark.parametrize(("count", "margin"), [(20, 0.0), (20, 0.02), (20, 0.05), (50, 0.02), (100, 0.02), (200, 0.02)])
def test_a_gate_of_right_or_wrong_scores_raises_few_false_alarms(count, margin, differ):
    # 5.2% is the most: where the drop is as large as the margin.
    assert alarms(count, (differ + margin) / 2, (differ - margin) / 2, margin) < 0.0525
    if margin:
        assert alarms(count, differ / 2, differ / 2, margin) < 0.04


def test_and_finds_a_drop():
    assert alarms(100, 0.25, 0.05, 0.02) > 0.9
    assert alarms(200, 0.21, 0.09, 0.02) > 0.8


def test_scores_on_a_scale_over_tasks_raise_few_false_alarms():
    """Sixteen answers to each of 40 problems, and four small tasks of right-or-wrong scores; the drop is the margin."""
    dice, margin, hits, runs = np.random.default_rng(7), 0.02, 0, 400
    for _ in range(runs // 2):
        first, second = dice.binomial(16, 0.5, 40) / 16, dice.binomial(16, 0.52, 40) / 16
        hits += apart(first - second).p_below(margin) < 0.05
        tasks = [dice.choice([-1.0, 0.0, 1.0], 15, p=[0.16, 0.7, 0.14]) for _ in range(4)]
        hits += apart(*tasks).p_below(margin) < 0.05
    assert hits / runs < 0.05 + 2.5 * (0.05 * 0.95 / runs) ** 0.5


def test_the_bootstrap_is_the_same_every_time_and_near_students_interval():
    dice = np.random.default_rng(3)
    first = {("a", number): float(value) for number, value in enumerate(dice.random(80))}
    second = {("a", number): float(value) for number, value in enumerate(dice.random(80))}
    found = difference(first, second)
    low, high = found.bootstrap()
    assert (low, high) == found.bootstrap()
    assert (low, high) == pytest.approx((found.low, found.high), abs=0.02)


def test_the_bootstrap_draws_within_each_task():
    """A task whose documents all differ by as much adds nothing to the width; pooled documents would."""
    spread = [1.0, 0.0, 0.5, 0.25, 0.0, 0.75] * 8
    low, high = apart(spread).bootstrap()
    both_low, both_high = apart(spread, [-1.0] * 48).bootstrap()
    assert both_high - both_low == pytest.approx((high - low) / 2, rel=0.1)
    assert both_low < (fmean(spread) - 1) / 2 < both_high


@pytest.mark.parametrize("by_task", [[[0.5]], [[0.5, 0.1], [0.3]], [[0.0, 0.0, 0.0]], [[1.0, 1.0], [0.2, 0.2]]])
def test_no_spread_is_no_bootstrap_either(by_task):
    assert apart(*by_task).bootstrap() is None


def test_the_bootstrap_covers_the_truth():
    dice, covered = np.random.default_rng(5), 0
    for _ in range(200):
        low, high = apart(dice.choice([-1.0, 0.0, 1.0], 60, p=[0.2, 0.7, 0.1])).bootstrap()
        covered += low <= -0.1 <= high
    assert 0.9 <= covered / 200 <= 0.99
