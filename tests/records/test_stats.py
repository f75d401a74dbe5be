"""Intervals of mean scores, against scipy and against known values."""

import math

import pytest
from scipy.stats import binomtest, t

from evictbench.stats import mean_interval, mean_of_tasks


def test_right_or_wrong_scores_get_wilsons_interval():
    low, high = mean_interval([1.0] * 15 + [0.0] * 15)
    assert (round(low, 2), round(high, 2)) == (0.33, 0.67)
    known = binomtest(450, 500).proportion_ci(method="wilson")
    assert mean_interval([1] * 450 + [0] * 50) == pytest.approx((known.low, known.high))


def test_all_right_is_not_certain():
    low, high = mean_interval([1.0] * 10)
    assert high == 1.0
    assert 0.6 < low < 0.8


def test_shares_get_students_interval_inside_zero_and_one():
    scores = [0.25, 0.5, 1.0, 0.75, 1.0]
    mean = sum(scores) / 5
    spread = math.sqrt(sum((score - mean) ** 2 for score in scores) / 4)
    half = t.ppf(0.975, 4) * spread / math.sqrt(5)
    assert mean_interval(scores) == pytest.approx((mean - half, min(1.0, mean + half)))


def test_shares_that_are_all_alike_are_not_certain_either():
    low, high = mean_interval([0.5, 0.5, 0.5])
    assert low < 0.3
    assert high > 0.7


@pytest.mark.parametrize("scores", [[], [1.0], [0.4]])
def test_fewer_than_two_have_none(scores):
    assert mean_interval(scores) is None


def test_the_mean_of_one_task_is_that_task():
    scores = [1.0, 0.0, 1.0, 1.0]
    mean, interval = mean_of_tasks({"only": scores})
    assert mean == 0.75
    assert interval == pytest.approx(mean_interval(scores))


def test_the_mean_of_tasks_weighs_tasks_alike_and_is_surer_than_each():
    tasks = {"a": [1.0] * 90 + [0.0] * 10, "b": [1.0, 0.0] * 10}
    mean, (low, high) = mean_of_tasks(tasks)
    assert mean == pytest.approx(0.7)
    a, b = mean_interval(tasks["a"]), mean_interval(tasks["b"])
    assert mean - low == pytest.approx(math.hypot(0.9 - a[0], 0.5 - b[0]) / 2)
    assert high - mean == pytest.approx(math.hypot(a[1] - 0.9, b[1] - 0.5) / 2)


def test_a_task_with_one_sample_leaves_the_mean_without_interval():
    assert mean_of_tasks({"a": [1.0, 0.0], "b": [1.0]}) == (0.75, None)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Of 600 experiments with a known truth (two tasks, 40 right-or-wrong samples each), about 95% are covered."""
    import random

    dice = random.Random(5)
    covered = 0
    for _ in range(600):
        tasks = {
            "a": [float(dice.random() < 0.9) for _ in range(40)],
            "b": [float(dice.random() < 0.4) for _ in range(40)],
        }
        _, (low, high) = mean_of_tasks(tasks)
        covered += low <= 0.65 <= high
    assert 0.92 < covered / 600 < 0.99
