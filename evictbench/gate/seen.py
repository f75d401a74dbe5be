"""The entries that queries saw under a policy whose budget is no bound, beside the findings about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from evictbench.gate.cells import Cell, cells_of
from evictbench.gate.finding import Finding
from evictbench.store.select import budget_bounds, entries_seen

if TYPE_CHECKING:
    import pandas as pd


def with_entries_seen(findings: Iterable[Finding], runs: Callable[[], pd.DataFrame]) -> list[Finding]:
    """The findings; those about a policy whose budget is no bound say what was seen in the runs.

    runs: returns the frame of the runs; it is asked only where there is such a policy.
    """
    answers = list(findings)
    policies = {policy_of(finding.cell) for finding in answers if policy_of(finding.cell) != finding.cell}
    soft = {policy for policy, bound in budget_bounds(policies).items() if not bound}
    if not soft:
        return answers
    cells = [cell for cell in cells_of(runs()) if str(cell.about["policy"]) in soft]
    return [replace(finding, seen=seen(finding, cells)) for finding in answers]


def policy_of(cell: str) -> str:
    """The policy in a cell's name; the whole name where the cell has no budget."""
    return cell.rpartition(" @ ")[0] or cell


def seen(finding: Finding, cells: Iterable[Cell]) -> str | None:
    """What the samples that a finding is about saw: those of its task, or of all where it is about their mean. None for
    a cell of another policy."""
    own = [
        cell.samples
        for cell in cells
        if cell.name == finding.cell and finding.suite in (cell.suite, str(cell.about["suite"]))
    ]
    names = ("task", "occupancy_mean", "occupancy_max")
    lines = [line for samples in own for line in zip(*(samples[name].tolist() for name in names), strict=True)]
    lines = [line for line in lines if str(line[0]) == finding.task] or lines
    return entries_seen(fmean(line[1] for line in lines), max(line[2] for line in lines)) if lines else None
