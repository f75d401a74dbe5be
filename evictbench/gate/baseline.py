"""Runs against a baseline that they may differ from: has a score dropped, or a cost risen, by more than chance?

Each cell is one question over all of its documents, tasks weigh alike, and p is Holm's over the cells of the gate. A
score fails if the sign-flip test of "it has dropped by more than the tolerance" is significant. A cost fails if its
mean has risen beyond its tolerance and significantly more documents rose than fell. Costs are compared on the samples
whose prompts and answers are as long in both, if there are any, because a longer answer needs a larger cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Literal

from evictbench.errors import UserError
from evictbench.gate.cells import Cell, Pair, documents
from evictbench.gate.finding import Finding
from evictbench.gate.tolerances import (
    ABOVE_LEVEL,
    BYTES_TOLERANCE,
    COST_LEVEL,
    OCCUPANCY_TOLERANCE,
    POWER,
    SCORE_LEVEL,
    TOLERANCE,
)
from evictbench.stats.intervals import holm
from evictbench.stats.paired import Difference, Documents, difference
from evictbench.stats.power import effective_documents, smallest_difference
from evictbench.store.select import FULL, comparable

if TYPE_CHECKING:
    import pandas as pd

COSTS = {"occupancy": ("occupancy_mean", OCCUPANCY_TOLERANCE), "bytes": ("cache_bytes", BYTES_TOLERANCE)}
"""The costs: their columns, and the rise that passes, as a share."""

ROUNDING = 6
"""Decimals of a cost that are compared."""


def against_baseline(pairs: Sequence[Pair], tolerance: float = TOLERANCE) -> list[Finding]:
    """A finding about the score of each cell, then about the costs of each cell with a budget.

    tolerance: the drop in score, in [0, 1], that passes. Raises UserError if a cell has so few documents that no drop
    could be significant, so that the gate could not fail.
    """
    _enough(pairs)
    return [*_scores(pairs, tolerance), *_costs([pair for pair in pairs if pair.here.budgeted])]


def above_full(cells: Sequence[Cell], samples: pd.DataFrame) -> list[Finding]:
    """A warning for each cell whose score is significantly above the full cache's on the same documents."""
    group = comparable(samples).groupby(samples["fingerprint"].astype(str)).first().to_dict()
    groups = [group[str(cell.about["fingerprint"])] for cell in cells]
    full: dict[int, dict[tuple[str, int], float]] = {}
    for cell, number in zip(cells, groups, strict=True):
        if cell.about["policy_name"] == FULL:
            full.setdefault(number, {}).update(documents(cell.samples, "score"))
    compared = []
    for cell, number in zip(cells, groups, strict=True):
        if cell.budgeted and number in full:
            mine = documents(cell.samples, "score")
            apart = difference(mine, full[number])
            if apart is not None:
                compared.append((cell, mine, full[number], apart))
    adjusted = holm([apart.p_value() for *_, apart in compared])
    findings = []
    for (cell, mine, base, apart), p in zip(compared, adjusted, strict=True):
        if apart.value > 0 and p < ABOVE_LEVEL:
            why = (
                f"{100 * apart.value:.1f} points above the full cache, which eviction seldom is: look at how the full "
                "cache's answers fail."
            )
            findings.append(_finding("warning", cell, "above full", mine, base, apart, p, why))
    return findings


def smallest_found(apart: Difference, tolerance: float = TOLERANCE, cells: int = 1) -> float | None:
    """The true drop in score on which a gate fails with probability `POWER`; None if no document differs, because then
    the spread of a change is not known.

    apart: the differences, whose spread is used. cells: how many the gate compares. Right-or-wrong scores that drop by
    d differ in a share of d at least, so their spread is taken to be no less than that gives.
    """
    if not apart.wins and not apart.losses:
        return None
    effect = _smallest_effect(effective_documents([len(task) for task in apart.by_task]), SCORE_LEVEL / cells)
    spread = math.sqrt(fmean(pstdev(task) ** 2 for task in apart.by_task))
    drop = tolerance + effect * spread
    if all(value in (-1, 0, 1) for value in chain(*apart.by_task)):
        for _ in range(50):
            drop = min(1.0, tolerance + effect * max(spread, math.sqrt(drop * (1 - drop))))
    return drop


def _scores(pairs: Sequence[Pair], tolerance: float) -> list[Finding]:
    sides = [(pair.documents("score", "here"), pair.documents("score", "there")) for pair in pairs]
    changes = [_apart(here, there) for here, there in sides]
    adjusted = holm([change.p_below(tolerance) for change in changes])
    findings = []
    for pair, (here, there), change, p in zip(pairs, sides, changes, adjusted, strict=True):
        failed = p < SCORE_LEVEL
        finds = smallest_found(change, tolerance, len(pairs))
        if failed:
            why = (
                f"The score has dropped by {-100 * change.value:.1f} points on the same {change.documents} documents, "
                f"significantly more than the {100 * tolerance:g} that are let pass."
            )
        else:
            why = f"No drop beyond {100 * tolerance:g} points is shown"
            why += (
                "; no score differs."
                if finds is None
                else f"; with these documents one of {100 * finds:.1f} would be in {100 * POWER:.0f} of 100 cases."
            )
        cell = pair.here
        if cell.deviation is not None:
            spread = f"{100 * cell.deviation:.1f} points"
            why = f"{why[:-1]}; the mean of {cell.trainings} trainings, whose scores' standard deviation is {spread}."
        finding = _finding("failed" if failed else "passed", cell, "score", here, there, change, p, why)
        findings.append(replace(finding, finds=finds, trainings=cell.trainings, deviation=cell.deviation))
    return findings


@cache
def _smallest_effect(documents: int, level: float) -> float:
    """The smallest drop beyond the tolerance that is found with probability `POWER`, in standard deviations."""
    return smallest_difference(documents, 1.0, POWER, level, one_sided=True)


def _costs(pairs: Sequence[Pair]) -> list[Finding]:
    asked = [(pair, name, *_cost(pair, column)) for pair in pairs for name, (column, _) in COSTS.items()]
    adjusted = holm([_p_above(apart) for *_, apart in asked])
    findings = []
    for (pair, name, here, there, apart), p in zip(asked, adjusted, strict=True):
        allowed = COSTS[name][1]
        before = fmean(there.values())
        rise = apart.value / before if before else math.inf if apart.value > 0 else 0.0
        failed = rise > allowed and p < COST_LEVEL
        what = "Mean occupancy" if name == "occupancy" else "The decode cache"
        if failed:
            why = f"{what} has risen by {100 * rise:.2g}%, and {apart.wins} of {apart.documents} documents hold more."
        else:
            why = f"{what} has not risen by more than {100 * allowed:g}%."
            if rise > allowed:
                why = f"{what} has risen by {100 * rise:.2g}%, which is not more than chance."
        findings.append(_finding("failed" if failed else "passed", pair.here, name, here, there, apart, p, why))
    return findings


def _cost(pair: Pair, column: str) -> tuple[Documents, Documents, Difference]:
    """A column's document means on both sides, and their difference; only samples as long in both, if there are any."""
    samples = pair.samples
    alike = (samples["prompt_tokens_here"] == samples["prompt_tokens_there"]) & (
        samples["output_tokens_here"] == samples["output_tokens_there"]
    )
    samples = samples[alike] if alike.any() else samples
    here, there = (
        {key: round(value, ROUNDING) for key, value in documents(samples, f"{column}_{side}").items()}
        for side in ("here", "there")
    )
    return here, there, _apart(here, there)


def _p_above(apart: Difference) -> float:
    """One-sided p of the sign test of "more documents are above than below"."""
    return apart.sign_test() / 2 if apart.wins > apart.losses else 1.0


def _apart(here: Documents, there: Documents) -> Difference:
    change = difference(here, there)
    assert change is not None  # pairs have a document in common
    return change


def _enough(pairs: Sequence[Pair]) -> None:
    """Raise UserError for a cell in which not even a drop of every document would be significant."""
    least = math.floor(math.log2(len(pairs) / SCORE_LEVEL)) + 1  # so many flips are all heads once in that many cases
    for pair in pairs:
        count = len(pair.documents("score", "here"))
        if count < least:
            raise UserError(
                f"{pair.here.name} on {pair.here.suite} has {count} document{'s' if count > 1 else ''} to compare, and "
                f"a drop cannot be shown with fewer than {least} where {len(pairs)} cells are gated at once."
            )


def _finding(
    status: Literal["passed", "failed", "warning"],
    cell: Cell,
    quantity: str,
    here: Documents,
    there: Documents,
    apart: Difference,
    p: float | None,
    why: str,
) -> Finding:
    return Finding(
        status=status,
        cell=cell.name,
        suite=cell.suite,
        task=cell.task,
        quantity=quantity,
        here=_mean(here, there),
        there=_mean(there, here),
        difference=apart.value,
        low=apart.low,
        high=apart.high,
        p=p,
        samples=apart.documents,
        why=why,
        fails=status == "failed",
    )


def _mean(mine: Documents, other: Documents) -> float:
    """The mean over tasks of the mean over the documents that both have."""
    by_task: dict[str, list[float]] = {}
    for key in sorted(mine.keys() & other.keys()):
        by_task.setdefault(key[0], []).append(mine[key])
    return fmean(fmean(values) for values in by_task.values())
