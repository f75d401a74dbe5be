"""Two policies on the same samples: is the difference real?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from evictbench.stats import Interval, spread_interval

Sample = TypeVar("Sample")


@dataclass(frozen=True)
class Paired:
    """The difference `first - second` over the samples that both have.

    interval: 95%, by Student's t. t_test: two-sided p of the paired t-test. sign_test: two-sided exact p of the sign
    test, which for right-or-wrong scores is McNemar's; samples without a difference say nothing. p is 1 where nothing
    differs. wins, losses: samples where first is above and below.
    """

    count: int
    mean: float
    interval: Interval | None
    t_test: float
    sign_test: float
    wins: int
    losses: int


def paired(first: Mapping[Sample, float], second: Mapping[Sample, float]) -> Paired:
    """Compare on the samples that both have; ValueError where there is none."""
    from scipy.stats import binomtest, ttest_1samp

    differences = [first[key] - second[key] for key in first if key in second]
    if not differences:
        raise ValueError("no sample is common to both")
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    t_test = 1.0
    if len(differences) > 1 and wins + losses:
        found = float(ttest_1samp(differences, 0.0).pvalue)
        t_test = 0.0 if math.isnan(found) else found
    return Paired(
        count=len(differences),
        mean=fmean(differences),
        interval=spread_interval(differences),
        t_test=t_test,
        sign_test=float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0,
        wins=wins,
        losses=losses,
    )
