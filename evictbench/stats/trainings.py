"""Several trainings of one method, the independent units: mean, standard deviation, and the interval of the mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from evictbench.stats.intervals import Interval, spread_interval


@dataclass(frozen=True)
class OverTrainings:
    """mean: of the trainings' values. deviation: their standard deviation with n - 1, as papers put it behind ±; None
    for one training. interval: the 95% interval of the mean by Student's t, whose units are the trainings, whatever the
    number of documents: it says where the mean of more trainings would be. None for one training."""

    mean: float
    deviation: float | None
    interval: Interval | None
    count: int


def over_trainings(values: Sequence[float]) -> OverTrainings:
    """What the values of so many trainings, one each, say together. ValueError for none."""
    if not values:
        raise ValueError("there is no training")
    several = len(values) > 1
    return OverTrainings(
        fmean(values), stdev(values) if several else None, spread_interval(values) if several else None, len(values)
    )
