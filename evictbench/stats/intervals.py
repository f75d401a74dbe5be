"""Intervals of mean scores, given how few samples they rest on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

Interval = tuple[float, float]

CONFIDENCE = 0.95
"""The confidence level of every interval."""


def mean_interval(scores: Sequence[float]) -> Interval | None:
    """The 95% interval of the mean of scores in [0, 1]; None for fewer than two.

    Right-or-wrong scores: Wilson's interval. Others: Wilson's at the number of right-or-wrong samples that would tell
    as much, as for surveys in clusters (Dean and Pagano, Journal of Survey Statistics and Methodology 3, 2015), with
    Student's quantile in place of the normal one. It is Student's interval pulled towards 1/2, stays inside [0, 1],
    and near 0 and 1 covers the truth more often. Scores that are all alike and neither 0 nor 1 have no spread to go
    by; they get the Wilson interval of that share of right answers, which is never narrower than the truth, a variance
    in [0, 1] being at most p·(1 - p).

    How often it covers the truth: right-or-wrong scores, on average over truths in [0.05, 0.95], 95% (20 to 200
    samples). The mean of 4 or 16 answers to each of 30 problems: 94% on average over such truths and over problems
    from alike to all-or-nothing, where Student's covers 92%; where the truth is 0.05 or 0.95 and the problems are
    all-or-nothing, 86%. Of 100 problems: 95% on average, 93% and more everywhere.
    """
    count = len(scores)
    if count < 2:
        return None
    total = math.fsum(scores)
    if all(score in (0, 1) for score in scores):
        return wilson(round(total), count)
    spread = stdev(scores)
    if spread == 0:
        return wilson(math.floor(total), count)[0], wilson(math.ceil(total), count)[1]
    from scipy.stats import t

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, count - 1))
    mean, error = total / count, spread / math.sqrt(count)
    pull = (quantile * error) ** 2 / (mean * (1 - mean))  # quantile² over the number that would tell as much
    middle = (mean + pull / 2) / (1 + pull)
    half = quantile * error * math.sqrt(1 + pull / (4 * mean * (1 - mean))) / (1 + pull)
    return max(0.0, middle - half), min(1.0, middle + half)


def wilson(successes: int, count: int) -> Interval:
    """Wilson's 95% interval of a share of right answers, inside [0, 1] (scipy's, without continuity correction);
    ValueError for no answers, or for more right ones than there are."""
    from scipy.stats import binomtest

    interval = binomtest(successes, count).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return max(0.0, float(interval.low)), min(1.0, float(interval.high))


def clustered_interval(by_problem: Sequence[Sequence[float]]) -> Interval | None:
    """The 95% interval of avg@k: of the mean over problems of each one's mean over its answers, scores in [0, 1].

    Problems are the independent samples, however many answers each has: see `mean_interval`, which also says how often
    it covers the truth. None for fewer than two problems; ValueError for a problem without an answer.
    """
    if not all(by_problem):
        raise ValueError("a problem has no answer")
    return mean_interval([fmean(scores) for scores in by_problem])


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values as they stand after as many comparisons (Holm 1979), in the order given: how often chance alone would
    put any of them this low is at most what each says."""
    from statsmodels.stats.multitest import multipletests

    return [float(p) for p in multipletests(p_values, method="holm")[1]] if p_values else []


def spread_interval(values: Sequence[float]) -> Interval | None:
    """The 95% interval of the mean of values of any size, by Student's t; None for fewer than two."""
    count = len(values)
    if count < 2:
        return None
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * stdev(values) / math.sqrt(count)
    return fmean(values) - half, fmean(values) + half


def best_of(scores: Sequence[float], k: int) -> float:
    """The best score to be expected of k answers drawn from these, without bias: the mean of the maximum over all
    ways to draw k. For right-or-wrong answers it is pass@k, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
    arXiv:2107.03374)."""
    if not 1 <= k <= len(scores):
        raise ValueError(f"k is {k}, and there are {len(scores)} scores")
    ordered = sorted(scores)
    draws = math.comb(len(ordered), k)
    # The score at place i is the maximum of every draw that takes it and k - 1 of the i below it.
    return math.fsum(score * (math.comb(i, k - 1) / draws) for i, score in enumerate(ordered))


def majority(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """The score of the answer given most often; of several, the one given first. None and "" are no answers; where
    there is nothing else, the score is 0."""
    counts: dict[str, int] = {}
    for answer in answers:
        if answer:
            counts[answer] = counts.get(answer, 0) + 1
    if not counts:
        return 0.0
    return scores[answers.index(max(counts, key=lambda answer: counts[answer]))]


def mean_of_tasks(tasks: Mapping[str, Sequence[float]]) -> tuple[float, Interval | None]:
    """The unweighted mean of the tasks' mean scores, and its 95% interval, which stays inside [0, 1] and is not zero
    wide where every answer was right. None if any task has fewer than two samples."""
    mean, interval = mean_of_means([(fmean(scores), mean_interval(scores)) for scores in tasks.values()])
    return mean, None if interval is None else (max(0.0, interval[0]), min(1.0, interval[1]))


def mean_of_means(means: Sequence[tuple[float, Interval | None]]) -> tuple[float, Interval | None]:
    """The unweighted mean of independent means that have intervals, and its own; None if one has none.

    The intervals combine by the method of variance estimates recovery (Zou and Donner, Statistics in Medicine 27,
    2008): each side's distances add in squares.
    """
    mean = fmean(value for value, _ in means)
    below = above = 0.0
    for value, interval in means:
        if interval is None:
            return mean, None
        below += ((value - interval[0]) / len(means)) ** 2
        above += ((interval[1] - value) / len(means)) ** 2
    return mean, (mean - math.sqrt(below), mean + math.sqrt(above))
