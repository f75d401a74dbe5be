"""How much of the full cache's score a policy keeps: a ratio of two means over the same documents, and its tests.

Retention is R = A / F, the mean of the task means under the policy over that under the full cache. "R is r" says that
a - r·f has mean 0, a document's two scores being a and f; so every question about R is one about a mean of paired
differences, and no ratio is ever linearised (Fieller 1940).

The mean is held against its standard error *if R were r*: the documents are given the likeliest weights that make their
mean 0 (empirical likelihood, Owen 1988); their spread within tasks is taken with these, and their skewness for the tail
(Pearson III). Of right-or-wrong scores that is the score test of a ratio of paired proportions (Nam and Blackwelder
2002). Student's t would take the spread as it is seen: of 30 documents that all come out alike it is none, and anything
would be significant. A loss and a gain of a whole document are added with next to no weight of their own, so that the
mean can always be made 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from evictbench.stats.intervals import CONFIDENCE, Interval

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.05
"""Probability of a false verdict."""

POWER = 0.8
"""Probability that a run that is as the paper says is "reproduced" with the documents that are said to be needed."""

UNSEEN = 1e-3
"""Weight, in documents, of the loss and the gain of a whole document that are added to the observed ones."""

MOST = 1e4
"""Multiple of the present documents beyond which no number of documents is said to be enough."""


@dataclass(frozen=True)
class Retention:
    """Scores in [0, 1] of the same documents, by task: under the policy, and under the full cache.

    weights: of the tasks, 1 in all; None where tasks weigh alike. Made by `retention`, which sees to it that the full
    cache's mean is above 0.
    """

    by_task: tuple[tuple[tuple[float, float], ...], ...]
    weights: tuple[float, ...] | None = None

    @property
    def documents(self) -> int:
        """Documents in all."""
        return sum(map(len, self.by_task))

    @property
    def score(self) -> float:
        """The policy's mean score."""
        return self._mean(0)

    @property
    def full(self) -> float:
        """The full cache's mean score."""
        return self._mean(1)

    @property
    def value(self) -> float:
        """Retention; above 1 where the policy scores better than the full cache."""
        return self.score / self.full

    def p_below(self, ratio: float, spread: float = 0.0) -> float:
        """One-sided p of "the true retention is below `ratio`", a number above 0 that is itself known to within the
        standard error `spread`."""
        from scipy.stats import pearson3

        distance, _, skew = self._standing(ratio, spread)
        return float(pearson3.cdf(distance, skew))

    def p_above(self, ratio: float, spread: float = 0.0) -> float:
        """One-sided p of "the true retention is above `ratio`"."""
        from scipy.stats import pearson3

        distance, _, skew = self._standing(ratio, spread)
        return float(pearson3.sf(distance, skew))

    def interval(self) -> Interval | None:
        """The 95% interval: every retention that neither test would refuse at 2.5%. None where there is no upper end:
        the full cache's own score may be 0, or there are fewer than two documents of a task."""
        from scipy.optimize import brentq

        if min(map(len, self.by_task)) < 2:
            return None
        tail = (1 - CONFIDENCE) / 2
        least, high = 1e-6, max(2 * self.value, 1.0)
        while self.p_below(high) > tail:
            high *= 2
            if high > 1e3:
                return None
        low = 0.0
        if self.p_above(least) < tail:
            low = brentq(lambda ratio: self.p_above(ratio) - tail, least, high, xtol=1e-6)
        return float(low), float(brentq(lambda ratio: self.p_below(ratio) - tail, least, high, xtol=1e-6))

    def power(self, times: float, low: float, high: float, spread: float = 0.0) -> float:
        """Probability that `times` as many documents show a retention above `low` and below `high`, each at 5%, if the
        true one is in the middle. The full cache's score and the spread are those of the present documents."""
        from scipy.stats import norm, pearson3

        middle, missed = (low + high) / 2, 0.0
        true = self._standing(middle, spread, times)[1]
        for ratio, sign in ((low, 1), (high, -1)):
            _, error, skew = self._standing(ratio, spread, times)
            needed = float(pearson3.isf(LEVEL, sign * skew)) * error + max(self._steps) / times / 2
            missed += float(norm.cdf((needed - abs(middle - ratio) * self.full) / true))
        return max(0.0, 1 - missed)

    def documents_needed(self, low: float, high: float, spread: float = 0.0) -> int | None:
        """Documents in all, each task's in proportion, for `power` of 80%; None where no number would do."""
        from scipy.optimize import brentq

        least = 2 * len(self.by_task) / self.documents
        if self.power(MOST, low, high, spread) < POWER:
            return None
        if self.power(least, low, high, spread) >= POWER:
            return 2 * len(self.by_task)
        times = float(brentq(lambda times: self.power(times, low, high, spread) - POWER, least, MOST, rtol=1e-4))
        return math.ceil(times * self.documents)

    @cached_property
    def _scores(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each task the distinct pairs of scores `[pairs, 2]`, and how many documents have each `[pairs]`."""
        import numpy as np

        distinct = [np.unique(np.asarray(task, dtype=float), axis=0, return_counts=True) for task in self.by_task]
        return [(pairs, counts.astype(float)) for pairs, counts in distinct]

    @cached_property
    def _shares(self) -> list[float]:
        """The weight of each task, 1 in all."""
        return list(self.weights or [1 / len(self.by_task)] * len(self.by_task))

    @cached_property
    def _steps(self) -> list[float]:
        """For each task the weight of one document in the mean."""
        return [share / len(task) for share, task in zip(self._shares, self.by_task, strict=True)]

    def _mean(self, side: int) -> float:
        tasks = zip(self._steps, self._scores, strict=True)
        return math.fsum(step * float(counts @ pairs[:, side]) for step, (pairs, counts) in tasks)

    def _standing(self, ratio: float, spread: float = 0.0, times: float = 1.0) -> tuple[float, float, float]:
        """Were `ratio` the true retention: how many standard errors A - ratio·F is from 0, less the half of one
        document's answer, scores moving in steps (Yates 1934); the standard error; the skewness of A - ratio·F, which
        a normal tail would leave out. times: as if there were so many times the documents."""
        variance, third = self._moments(ratio)
        error = math.hypot(math.sqrt(variance / times), spread * self.full)
        distance = self.score - ratio * self.full
        distance = math.copysign(max(0.0, abs(distance) - max(self._steps) / times / 2), distance)
        return distance / error, error, third / times**2 / error**3

    def _moments(self, ratio: float) -> tuple[float, float]:
        """The second and third central moment of A - ratio·F if `ratio` were the true retention."""
        import numpy as np
        from scipy.optimize import brentq

        values = [np.append(pairs @ (1.0, -ratio), (-ratio, 1.0)) for pairs, _ in self._scores]
        priors = [np.append(counts, (UNSEEN, UNSEEN)) for _, counts in self._scores]
        scales = [step * self.documents for step in self._steps]
        pooled = np.concatenate([scale * value for scale, value in zip(scales, values, strict=True)])
        every = np.concatenate(priors)
        ends = -(1 - 1e-10) / pooled.max(), -(1 - 1e-10) / pooled.min()
        strength = brentq(lambda strength: float(every @ (pooled / (1 + strength * pooled))), *ends, xtol=1e-12)
        second = third = 0.0
        for share, step, scale, value, prior in zip(self._shares, self._steps, scales, values, priors, strict=True):
            weight = prior / (1 + strength * scale * value)
            weight /= weight.sum()
            centred = value - float(weight @ value)
            second += share * step * float(weight @ centred**2)
            third += share * step**2 * float(weight @ centred**3)
        return second, third


def retention(
    arm: Mapping[tuple[str, int], float],
    full: Mapping[tuple[str, int], float],
    tasks: Sequence[str],
    weights: Mapping[str, float] | None = None,
) -> Retention | None:
    """The retention over the documents of these tasks that both runs have.

    arm, full: the mean score over repeats by (task, doc_id), under the policy and under the full cache. weights: of
    the tasks, 1 in all; None where they weigh alike. None if a task has no document in common, or the full cache scores
    0.
    """
    common = sorted(arm.keys() & full.keys())
    by_task = tuple(tuple((arm[key], full[key]) for key in common if key[0] == task) for task in tasks)
    if not by_task or not all(by_task) or not any(pair[1] > 0 for task in by_task for pair in task):
        return None
    return Retention(by_task, None if weights is None else tuple(weights[task] for task in tasks))
