"""Perplexity and ratios of means against closed forms, and how often their intervals cover the truth."""

import math

import numpy as np
import pytest

from evictbench.stats.intervals import spread_interval
from evictbench.stats.ratios import perplexity, perplexity_increase, ratio_of_means
from evictbench.stats.trainings import over_trainings


def test_perplexity_is_over_tokens_and_not_a_mean_of_perplexities():
    value, _ = perplexity([1.0, 3.0], [30, 10])
    assert value == pytest.approx(math.exp(1.5))
    assert value != pytest.approx((math.exp(1) + math.exp(3)) / 2)
    assert value != pytest.approx(math.exp(2))
    assert perplexity([2.0], [5]) == (pytest.approx(math.exp(2)), None)


def test_documents_of_one_length_have_students_interval():
    nll = [1.0, 1.4, 2.2, 0.9]
    low, high = spread_interval(nll)
    assert perplexity(nll, [7] * 4)[1] == pytest.approx((math.exp(low), math.exp(high)))
    value, interval = ratio_of_means(nll, [2.0] * 4)
    assert value == pytest.approx(np.mean(nll) / 2)
    assert interval == pytest.approx((low / 2, high / 2))


def test_an_increase_knows_that_the_tokens_are_the_same():
    """Documents far apart in difficulty, of which each gets harder by as much: the increase is sure."""
    full, tokens = [0.5, 1.0, 2.0, 3.0], [10, 20, 10, 20]
    nll = [value + 0.1 for value in full]
    value, (low, high) = perplexity_increase(nll, full, tokens)
    assert value == pytest.approx(perplexity(nll, tokens)[0] - perplexity(full, tokens)[0])
    apart = perplexity(nll, tokens)[1]
    assert 0 < high - low < 0.12 * (apart[1] - apart[0])
    assert perplexity_increase(full, full, tokens) == (0, (0, 0))


def test_intervals_cover_the_truth():
    """Documents of very different length, the longer ones easier: a mean over documents would be elsewhere."""
    draw = np.random.default_rng(0)
    every = draw.integers(20, 400, 20_000)
    nll = 3 - every / 200 + draw.normal(0, 0.5, len(every))
    truth = math.exp((nll * every).sum() / every.sum())
    inside = 0
    for _ in range(300):
        chosen = draw.integers(0, len(every), 40)
        low, high = perplexity(nll[chosen].tolist(), every[chosen].tolist())[1]
        inside += low < truth < high
    assert 0.91 < inside / 300 < 0.985
    assert not 0.9 * truth < math.exp(nll.mean()) < 1.1 * truth


def test_nothing_to_divide_by():
    with pytest.raises(ValueError, match="divided by is 0"):
        ratio_of_means([1.0, 2.0], [0.0, 0.0])


def test_trainings_are_the_units():
    found = over_trainings([0.4, 0.5, 0.6])
    assert (found.mean, found.count) == (pytest.approx(0.5), 3)
    assert found.deviation == pytest.approx(0.1)
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert found.interval == pytest.approx((0.5 - half, 0.5 + half), rel=1e-5)
    alone = over_trainings([0.4])
    assert (alone.mean, alone.deviation, alone.interval) == (0.4, None, None)
    with pytest.raises(ValueError, match="no training"):
        over_trainings([])
