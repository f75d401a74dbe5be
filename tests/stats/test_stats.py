"""Intervals of mean scores against published and hand-worked cases, and how often they cover a known truth."""

import itertools
import math
import random

import numpy as np
import pytest
from scipy.stats import binom, binomtest, t

from evictbench.stats.intervals import (
    best_of,
    clustered_interval,
    holm,
    majority,
    mean_interval,
    mean_of_tasks,
    spread_interval,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17, 1998, table I, the score method
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_as_published(successes, count, low, high):
    assert wilson(successes, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("count", [20, 50, 200])
def test_wilsons_interval_covers_a_truth_19_times_in_20_on_average(count):
    intervals = np.array([wilson(successes, count) for successes in range(count + 1)])
    coverage = []
    for truth in np.linspace(0.05, 0.95, 181):
        inside = (intervals[:, 0] <= truth) & (truth <= intervals[:, 1])
        coverage.append(binom.pmf(np.arange(count + 1), count, truth)[inside].sum())
    assert np.mean(coverage) == pytest.approx(0.95, abs=0.006)


def test_right_or_wrong_scores_get_wilsons_interval():
    low, high = mean_interval([1.0] * 15 + [0.0] * 15)
    assert (round(low, 2), round(high, 2)) == (0.33, 0.67)
    known = binomtest(450, 500).proportion_ci(method="wilson")
    assert mean_interval([1] * 450 + [0] * 50) == pytest.approx((known.low, known.high))


def test_all_right_is_not_certain():
    low, high = mean_interval([1.0] * 10)
    assert high == 1.0
    assert 0.6 < low < 0.8


def test_shares_get_wilsons_interval_of_as_many_right_or_wrong_samples_as_tell_as_much():
    scores = [0.25, 0.5, 1.0, 0.75, 1.0]
    mean, variance = 0.7, sum((score - 0.7) ** 2 for score in scores) / 4
    number = mean * (1 - mean) / (variance / 5)
    q = t.ppf(0.975, 4)
    # The two truths that are q standard errors away from the mean, at that number of samples: Wilson's equation.
    roots = np.roots([1 + q**2 / number, -2 * mean - q**2 / number, mean**2])
    assert mean_interval(scores) == pytest.approx(sorted(roots))
    for truth in mean_interval(scores):
        assert abs(mean - truth) == pytest.approx(q * math.sqrt(truth * (1 - truth) / number))


def test_of_many_shares_it_is_students_interval():
    dice = np.random.default_rng(1)
    scores = (0.4 + 0.3 * dice.random(4000)).tolist()
    assert mean_interval(scores) == pytest.approx(spread_interval(scores), abs=1e-4)


@pytest.mark.parametrize("scores", [[0.0] * 29 + [0.0625], [1.0] * 29 + [0.9375], [0.0, 1e-9], [1.0, 0.5]])
def test_it_stays_inside_zero_and_one_and_holds_the_mean(scores):
    low, high = mean_interval(scores)
    assert 0 <= low <= sum(scores) / len(scores) <= high <= 1
    assert low < high


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


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_the_best_of_k_is_the_mean_over_all_ways_to_draw_k(n):
    dice = random.Random(n)
    for scores in ([dice.random() for _ in range(n)], [float(dice.random() < 0.4) for _ in range(n)]):
        for k in range(1, n + 1):
            every = [max(drawn) for drawn in itertools.combinations(scores, k)]
            assert best_of(scores, k) == pytest.approx(sum(every) / len(every))


@pytest.mark.parametrize(("n", "right", "k"), [(16, 0, 4), (16, 1, 16), (16, 5, 4), (64, 3, 8), (16, 15, 2)])
def test_of_right_or_wrong_it_is_the_unbiased_pass_at_k(n, right, k):
    scores = [1.0] * right + [0.0] * (n - right)
    assert best_of(scores, k) == pytest.approx(1 - math.comb(n - right, k) / math.comb(n, k))
    assert best_of(scores, 1) == pytest.approx(right / n)


def test_c7_pass_at_1_does_not_shrink_as_answers_grow():
    assert best_of([1.0, 0.0] * 2, 1) == best_of([1.0, 0.0] * 32, 1) == 0.5


@pytest.mark.parametrize("k", [0, 3])
def test_more_than_there_are_cannot_be_drawn(k):
    with pytest.raises(ValueError, match="there are 2 scores"):
        best_of([1.0, 0.0], k)


@pytest.mark.parametrize(
    ("answers", "scores", "score"),
    [
        (["7", "8", "8"], [1.0, 0.0, 0.0], 0.0),
        (["7", "8", "7"], [1.0, 0.0, 1.0], 1.0),
        (["8", "7", "7", "8"], [0.0, 1.0, 1.0, 0.0], 0.0),  # a tie goes to what came first
        (["7", "8"], [1.0, 0.0], 1.0),
        (["", "", "7"], [0.0, 0.0, 1.0], 1.0),  # no answer is no vote
        ([None, None, "7"], [0.0, 0.0, 1.0], 1.0),
        (["", None], [0.0, 0.0], 0.0),
        (["a", "a"], [0.25, 0.75], 0.25),
    ],
)
def test_the_majority_is_the_answer_given_most_often(answers, scores, score):
    assert majority(answers, scores) == score


def test_values_of_any_size_get_students_interval():
    values = [2.0, 3.5, 7.0]
    half = t.ppf(0.975, 2) * math.sqrt(sum((value - 12.5 / 3) ** 2 for value in values) / 2 / 3)
    assert spread_interval(values) == pytest.approx((12.5 / 3 - half, 12.5 / 3 + half))
    assert spread_interval([1.0]) is None


def test_repeats_of_few_documents_are_no_more_documents():
    """Documents that are hard or easy, eight answers each: intervals over documents cover the truth, over samples
    they would not."""
    dice = random.Random(11)
    covered = fooled = 0
    for _ in range(300):
        means, samples = [], []
        for _ in range(20):
            ease = 0.95 if dice.random() < 0.5 else 0.05
            drawn = [float(dice.random() < ease) for _ in range(8)]
            means.append(sum(drawn) / 8)
            samples += drawn
        low, high = mean_interval(means)
        covered += low <= 0.5 <= high
        low, high = mean_interval(samples)
        fooled += not low <= 0.5 <= high
    assert covered / 300 > 0.9
    assert fooled / 300 > 0.2


def test_avg_at_k_is_over_problems():
    by_problem = [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0], [1.0, 1.0, 1.0]]
    assert clustered_interval(by_problem) == mean_interval([0.75, 0.0, 1.0])
    assert clustered_interval([[1.0, 0.0]]) is None
    with pytest.raises(ValueError, match="no answer"):
        clustered_interval([[1.0], []])


@pytest.mark.parametrize(("problems", "least", "least_anywhere"), [(30, 0.91, 0.82), (100, 0.93, 0.90)])
def test_avg_at_k_covers_the_truth_as_often_as_it_says(problems, least, least_anywhere):
    """Problems from all-or-nothing to alike (beta-distributed ease), 4 and 16 answers each; averaged over truths."""
    dice = np.random.default_rng(problems)
    found = []
    for truth in (0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95):
        for alike in (0.3, 1.0, 4.0):
            for answers in (4, 16):
                ease = dice.beta(truth * alike, (1 - truth) * alike, (100, problems))
                means = dice.binomial(answers, ease) / answers
                intervals = [mean_interval(row) for row in means.tolist()]
                found.append(np.mean([low <= truth <= high for low, high in intervals]))
    assert np.mean(found) >= least
    assert np.mean(found) <= 0.97
    assert min(found) >= least_anywhere - 0.05  # a hundred experiments each


def test_holm_by_hand():
    # In order: 0.005 x 4, 0.01 x 3, 0.03 x 2, and 0.04, which is not below the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.9]) == pytest.approx([0.8, 0.9])
    assert holm([0.7]) == [0.7]
    assert holm([]) == []


def test_holm_keeps_false_alarms_of_a_whole_sweep_at_5_per_cent(monkeypatch):
    monkeypatch.setattr("gc.collect", lambda: 0)  # statsmodels tidies up after every call
    dice = np.random.default_rng(2)
    sweeps = dice.random((2000, 12))
    alarms = np.mean([min(holm(p.tolist())) < 0.05 for p in sweeps])
    plain = np.mean(sweeps.min(axis=1) < 0.05)
    assert alarms == pytest.approx(0.05, abs=0.015)
    assert plain > 0.4
