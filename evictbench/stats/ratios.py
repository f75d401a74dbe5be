"""Ratios of sums over documents, with intervals: perplexity over all tokens, and answer lengths against others'.

Documents are the independent units, whatever their length. The interval of a function of sums is that of its
linearisation: each document's share of the sums' error, by Student's t (the delta method, as for ratio estimators in
surveys).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evictbench.stats.intervals import CONFIDENCE, Interval

LARGEST = 709.0
"""The largest number whose exponential a float holds."""

Estimate = tuple[float, Interval | None]
"""A value, and its 95% interval; None for fewer than two documents."""


def perplexity(nll: Sequence[float], tokens: Sequence[float]) -> Estimate:
    """exp of the mean negative log-likelihood over all tokens of all documents, never the mean of perplexities.

    nll: the mean over each document's tokens, in nats. tokens: how many those are. The interval is above 0.
    """
    mean = _over_tokens(nll, tokens)
    half = _half_width(_shares(nll, tokens, mean))
    return math.exp(mean), None if half is None else (math.exp(mean - half), math.exp(min(mean + half, LARGEST)))


def perplexity_increase(nll: Sequence[float], other: Sequence[float], tokens: Sequence[float]) -> Estimate:
    """The perplexity less that of `other` on the same tokens. The interval knows that the documents are the same."""
    mean, mean_other = _over_tokens(nll, tokens), _over_tokens(other, tokens)
    value, base = math.exp(mean), math.exp(mean_other)
    pairs = zip(_shares(nll, tokens, mean), _shares(other, tokens, mean_other), strict=True)
    half = _half_width([value * own - base * others for own, others in pairs])
    difference = value - base
    return difference, None if half is None else (difference - half, difference + half)


def ratio_of_means(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """The mean of values over the mean of others, document by document the same ones. ValueError where that is 0."""
    total = math.fsum(others)
    if total == 0:
        raise ValueError("the mean that is divided by is 0")
    ratio = math.fsum(values) / total
    half = _half_width([(value - ratio * other) / total for value, other in zip(values, others, strict=True)])
    return ratio, None if half is None else (ratio - half, ratio + half)


def _over_tokens(nll: Sequence[float], tokens: Sequence[float]) -> float:
    return math.fsum(value * count for value, count in zip(nll, tokens, strict=True)) / math.fsum(tokens)


def _shares(nll: Sequence[float], tokens: Sequence[float], mean: float) -> list[float]:
    """Each document's share of the error of the mean over tokens; they add up to 0."""
    total = math.fsum(tokens)
    return [count * (value - mean) / total for value, count in zip(nll, tokens, strict=True)]


def _half_width(shares: Sequence[float]) -> float | None:
    """Half of the 95% interval of a sum over documents, from each one's share of its error."""
    count = len(shares)
    if count < 2:
        return None
    from scipy.stats import t

    variance = count / (count - 1) * math.fsum(share * share for share in shares)
    return float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * math.sqrt(variance)
