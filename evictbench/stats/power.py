"""How small a difference between two runs on the same documents can be found, and how many documents one needs.

Documents are the independent units. `spread` is the standard deviation over documents of their differences, in the
scores' unit; `power` how often a difference of that size is found, and `alpha` how often one is found where there is
none. Scores on a scale go by the paired t-test, whose power is that of the sign-flip test that is used
(`evictbench.stats.paired`); right-or-wrong scores go by the exact sign test, which there is the sign-flip test.

A gate with a tolerance fails on drops that are surely larger: the drop that it finds is the tolerance and, above it,
`smallest_difference(..., one_sided=True)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

POWER = 0.8
"""Probability of finding a difference that is there."""

ALPHA = 0.05
"""Probability of finding a difference that is not there."""

MOST_DOCUMENTS = 10_000_000
"""The most that are said to be needed."""

DISCORDANT = 0.1
"""The share of right-or-wrong answers of which two runs are taken to differ where nothing is known. Two policies that
are worth comparing differ in more, and then smaller differences are harder to find."""


def smallest_difference(
    documents: int, spread: float, power: float = POWER, alpha: float = ALPHA, one_sided: bool = False
) -> float:
    """The smallest true mean difference that is found, in the unit of `spread`; infinite for fewer than two documents,
    0 where nothing is spread."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    if documents < 2 or spread == 0:
        return math.inf if documents < 2 else 0.0
    # statsmodels' TTestPower adds the other side, a power next to nothing, and for small alphas finds no number there.
    needed = float(t.isf(alpha if one_sided else alpha / 2, documents - 1))

    def beyond(effect: float) -> float:
        return float(nct.sf(needed, documents - 1, effect * math.sqrt(documents))) - power

    most = 1 / math.sqrt(documents)
    while beyond(most) < 0:
        most *= 2
    return float(brentq(beyond, 0.0, most, xtol=1e-9)) * spread


def documents_needed(
    difference: float, spread: float, power: float = POWER, alpha: float = ALPHA, one_sided: bool = False
) -> int | None:
    """Documents that find a true mean difference, at least two; None where ten million would not do."""
    if difference == 0:
        return None
    return _fewest(lambda documents: smallest_difference(documents, spread, power, alpha, one_sided) <= abs(difference))


@lru_cache(maxsize=256)
def smallest_right_wrong(
    documents: int, discordant: float, power: float = POWER, alpha: float = ALPHA, one_sided: bool = False
) -> float:
    """The smallest true difference between the shares of right answers, in [0, 1], that is found.

    discordant: the share of documents whose right-or-wrong scores differ between the two runs. A difference larger than
    that share means that more differ, all to one side. Infinite if the documents are too few to find any.
    """
    from scipy.optimize import brentq

    _check_share(discordant)

    def beyond(size: float) -> float:
        return right_wrong_power(size, documents, discordant, alpha, one_sided) - power

    if beyond(1.0) < 0:
        return math.inf
    return float(brentq(beyond, 0.0, 1.0, xtol=1e-6)) if beyond(0.0) < 0 else 0.0


def right_wrong_needed(
    difference: float, discordant: float, power: float = POWER, alpha: float = ALPHA, one_sided: bool = False
) -> int | None:
    """Documents that find a difference of right-or-wrong scores; None where ten million would not do. The exact test's
    power goes up in steps and down between them; from a few documents more it is surely enough."""
    _check_share(discordant)
    if difference == 0:
        return None
    return _fewest(
        lambda documents: right_wrong_power(abs(difference), documents, discordant, alpha, one_sided) >= power
    )


def right_wrong_power(
    difference: float, documents: int, discordant: float, alpha: float = ALPHA, one_sided: bool = False
) -> float:
    """How often the exact sign test finds a true difference in [0, 1] between the shares of right answers, where a
    share of `discordant` of the documents, or of the difference if that is more, differ."""
    import numpy as np
    from scipy.stats import binom

    share = max(discordant, difference)
    if share == 0:
        return 0.0
    least, most = binom.ppf([1e-9, 1 - 1e-9], documents, share)
    differ = np.arange(least, most + 1)
    level = alpha if one_sided else alpha / 2
    # So many of those that differ have to be above; the other side, of a power next to nothing, is left out.
    needed = binom.isf(level, differ, 0.5) + 1
    above = (1 + difference / share) / 2
    return float((binom.pmf(differ, documents, share) * binom.sf(needed - 1, differ, above)).sum())


def effective_documents(by_task: Sequence[int]) -> int:
    """Documents of one task that would tell as much as the mean over tasks of so many each: all of them together
    where the tasks have as many."""
    return int(len(by_task) ** 2 / sum(1 / documents for documents in by_task))


def smallest_before_a_run(by_task: Sequence[int], repeats: int = 1) -> float:
    """The smallest difference, in [0, 1], between the mean scores of two runs of so many documents per task that is
    found at best, before anything is known of the scores: as if they were right or wrong, `DISCORDANT` of them
    differed, and repeats were as good as documents."""
    documents = effective_documents(by_task)
    if repeats == 1:
        return smallest_right_wrong(documents, DISCORDANT)
    return smallest_difference(documents, math.sqrt(DISCORDANT / repeats))


def in_words(by_task: Sequence[int], repeats: int, tolerance: float) -> str:
    """A sentence with the smallest difference between two runs that can be told from chance.

    by_task: documents of each task. repeats: answers to each document. tolerance: that of a gate; for a difference
    that is no larger, the sentence is "".
    """
    by_task = [documents for documents in by_task if documents]
    smallest = smallest_before_a_run(by_task, repeats)
    if smallest <= tolerance:
        return ""
    if smallest > 1:
        return "no difference from another run on these documents: too few of them to tell any from chance"
    mean = " of the mean over tasks" if len(by_task) > 1 else ""
    return (
        f"differences{mean} of {100 * smallest:.1f} points and more from another run on these documents, at best "
        f"({POWER:.0%} of the time, if {DISCORDANT:.0%} of the answers differ); a gate tolerates {100 * tolerance:g}"
    )


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The smallest number of documents from 2 on that is enough, taken to stay so."""
    most = 2
    while not enough(most):
        most *= 2
        if most > MOST_DOCUMENTS:
            return None
    least = most // 2  # not enough, or 1
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if enough(middle) else (middle, most)
    return most


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"a share of documents that differ is in [0, 1], not {share:g}")
