"""Two runs on the same samples: how far apart they are, and whether that is more than chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from evictbench.stats import mean_of_means, spread_interval

Documents = Mapping[tuple[str, int], float]
"""(task, doc_id): the mean score over its repeats."""

FLIPS = 10_000
"""Draws of signs, where there are too many documents to go through all."""


@dataclass(frozen=True)
class Difference:
    """The mean over tasks of the mean difference over the documents that both have; low and high: 95%, by Student's t
    within each task, None where a task has fewer than two documents or nothing differs."""

    value: float
    low: float | None
    high: float | None
    documents: int
    by_task: tuple[tuple[float, ...], ...]

    def p_value(self) -> float:
        """Two-sided p of the sign-flip test: were the two alike, each document's difference would as likely have the
        other sign. Documents are the independent units, whatever the number of repeats; exact up to 13 documents
        that differ, from 10,000 draws of a fixed seed beyond."""
        import numpy as np

        parts = [
            np.asarray([value for value in task if value]) / len(task) / len(self.by_task) for task in self.by_task
        ]
        weights = np.concatenate(parts)
        if not len(weights):
            return 1.0
        seen = abs(weights.sum()) - 1e-12
        if len(weights) <= 13:
            signs = 1 - 2 * ((np.arange(2 ** len(weights))[:, None] >> np.arange(len(weights))) & 1)
            return float((np.abs(signs @ weights) >= seen).mean())
        draw = np.random.default_rng(0)
        hits = 0
        for _ in range(10):
            signs = draw.integers(0, 2, (FLIPS // 10, len(weights)), dtype=np.int8) * np.int8(2) - np.int8(1)
            hits += int((np.abs(signs @ weights) >= seen).sum())
        return (hits + 1) / (FLIPS + 1)


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
