"""Two runs on the same samples: how far apart they are, and whether that is more than chance.

Documents are the independent units, whatever the number of repeats, and tasks weigh alike. Three ways to ask, and when:

    p_value, p_below   the sign-flip test of the mean difference: what reports and gates decide by. It needs no normal
                       scores and holds for a dozen documents; of right-or-wrong scores of one task it is McNemar's
                       exact test.
    sign_test          who is above more often, whatever by how much: no single document can decide it.
    bootstrap          an interval without Student's assumptions, beside `low` and `high`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING

from evictbench.stats.intervals import CONFIDENCE, Interval, mean_of_means, spread_interval

if TYPE_CHECKING:
    import numpy as np

Documents = Mapping[tuple[str, int], float]
"""(task, doc_id): the mean score over its repeats."""

FLIPS = 10_000
"""Draws of signs, where there are too many outcomes to go through all."""

MOST_OUTCOMES = 200_000
"""Outcomes of flipping signs that are gone through one by one; two hundred right-or-wrong documents have fewer."""

RESAMPLES = 9_999
"""Resamples of the bootstrap."""


@dataclass(frozen=True)
class Difference:
    """The mean over tasks of the mean difference over the documents that both have; low and high: 95%, by Student's t
    within each task, None where a task has fewer than two documents or nothing differs. by_task: the differences."""

    value: float
    low: float | None
    high: float | None
    documents: int
    by_task: tuple[tuple[float, ...], ...]

    @property
    def wins(self) -> int:
        """Documents where the first is above the second."""
        return sum(value > 0 for value in chain(*self.by_task))

    @property
    def losses(self) -> int:
        """Documents where it is below."""
        return sum(value < 0 for value in chain(*self.by_task))

    def p_value(self) -> float:
        """Two-sided p of the sign-flip test: were the two alike, each document's difference would as likely have the
        other sign. Exact where the signs have few enough outcomes, from 10,000 draws of a fixed seed beyond."""
        weights = self._weights(0.0)
        return _share_of_flips(weights, abs(float(weights.sum())), both=True)

    def p_below(self, margin: float) -> float:
        """One-sided p of "the true difference is below -margin": what a gate fails on. margin: 0 or more, in the
        scores' unit.

        The sign-flip test of the differences with the margin added: at a true difference of -margin, what is left
        would as likely have the other sign. That asks for differences that lie evenly about their mean. Where they do
        not, p under 5% comes up, at a true difference of -margin, in at most 5.2% of runs of 20 to 200 right-or-wrong
        documents (every outcome weighed; far less often where nothing has changed and the margin is more than 0), in
        2% with losses further out than gains, but in 10% with gains few and large among losses small and many
        (exponential, 30 documents). Student's t does no better there, and its false alarms of right-or-wrong
        scores are as many.
        """
        weights = self._weights(margin)
        return _share_of_flips(weights, -float(weights.sum()), both=False)

    def sign_test(self) -> float:
        """Two-sided exact p of the sign test over all documents, which for right-or-wrong scores is McNemar's; 1 where
        nothing differs. Documents that do not differ say nothing."""
        from scipy.stats import binomtest

        wins, losses = self.wins, self.losses
        return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0

    def bootstrap(self) -> Interval | None:
        """The 95% interval of `value` by the bias-corrected and accelerated bootstrap (Efron 1987): documents drawn
        within each task, 9,999 times, seed fixed. None where a task has fewer than two documents or nothing differs.
        """
        from scipy.stats import bootstrap

        if min(map(len, self.by_task)) < 2 or all(len(set(task)) == 1 for task in self.by_task):
            return None
        interval = bootstrap(
            [*self.by_task],
            lambda *tasks, axis: sum(task.mean(axis=axis) for task in tasks) / len(tasks),
            n_resamples=RESAMPLES,
            batch=1_000,
            vectorized=True,
            confidence_level=CONFIDENCE,
            rng=0,
        ).confidence_interval
        return float(interval.low), float(interval.high)

    def _weights(self, margin: float) -> np.ndarray:
        """Each document's share of `value` + margin, without the shares that are 0."""
        import numpy as np

        parts = [(np.asarray(task) + margin) / len(task) / len(self.by_task) for task in self.by_task]
        weights: np.ndarray = np.concatenate(parts)
        nonzero: np.ndarray = weights[weights != 0]
        return nonzero


def difference(first: Documents, second: Documents, task: str | None = None) -> Difference | None:
    """`first - second`; of one task alone where it is named. None where no document is common to both."""
    by_task: dict[str, list[float]] = {}
    for key in sorted(first.keys() & second.keys()):
        if task is None or key[0] == task:
            by_task.setdefault(key[0], []).append(first[key] - second[key])
    if not by_task:
        return None
    value, interval = mean_of_means([(fmean(values), spread_interval(values)) for values in by_task.values()])
    low, high = interval or (None, None)
    if low == high:  # nothing differs, or all by as much: that is no interval
        low = high = None
    values = tuple(tuple(task_values) for task_values in by_task.values())
    return Difference(value, low, high, sum(map(len, values)), values)


def _share_of_flips(weights: np.ndarray, seen: float, both: bool) -> float:
    """How likely a sum of weights whose signs are flipped at random is at least `seen`, on either side if both."""
    import numpy as np

    seen -= 1e-12  # sums in another order are the same outcome
    if not len(weights):
        return 1.0
    sizes, counts = np.unique(np.abs(weights).round(14), return_counts=True)
    outcomes = float(np.prod(counts + 1.0))
    if outcomes <= MOST_OUTCOMES:
        sums, shares = _every_flip(sizes, counts)
        return min(1.0, float(shares[(np.abs(sums) if both else sums) >= seen].sum()))
    # scipy's permutation_test draws the same, and takes five times as long over a thousand documents.
    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(10):
        signs = draw.integers(0, 2, (FLIPS // 10, len(weights)), dtype=np.int8) * np.int8(2) - np.int8(1)
        sums = signs @ weights
        hits += int(((np.abs(sums) if both else sums) >= seen).sum())
    return (hits + 1) / (FLIPS + 1)


def _every_flip(sizes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every sum that flipped signs can come to, and how likely it is; of each size there are so many."""
    import numpy as np
    from scipy.stats import binom

    sums, shares = np.zeros(1), np.ones(1)
    for size, count in zip(sizes, counts, strict=True):
        kept = np.arange(count + 1)
        sums = np.add.outer(sums, size * (2 * kept - count)).ravel()
        shares = np.multiply.outer(shares, binom.pmf(kept, count, 0.5)).ravel()
    return sums, shares
