"""Was a paper's number reproduced? Retention here, with its interval, against retention there.

Retention is the score over the full cache's on the same documents. Scores are not compared, because prompts, graders
and weights move a score and the full cache's alike. A paper's retention is its value over its full cache's. Both are
known only as they are printed, so it is a range, which holds both numbers if a paper contradicts itself. The tolerance
lies around the range.

    below           the true retention is below the range by more than the tolerance: one-sided 5%, with Holm's
                    correction over all rows, so that any false verdict in a whole gate is that rare
    above           the true retention is above the range by more than the tolerance: likewise
    reproduced      it is within the tolerance on both sides, each at 5%, of this row alone
    too few samples no verdict is possible; the finding says with how many documents a run that is as the paper says
                    would be "reproduced" four times in five
    not comparable  a protocol field that the paper states differs here, or a number is missing that it takes

A published spread counts as the standard error of the number. Without one, the number is taken as exact to its printed
digits, though it was measured on a limited number of documents too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from evictbench.gate.finding import Finding, Status
from evictbench.gate.match import (
    Arm,
    arms,
    full_beside,
    is_score,
    other_settings,
    protocol_differs,
    speaks_of,
    tasks_of,
    unstated,
)
from evictbench.gate.retention import LEVEL, POWER, Retention, retention
from evictbench.gate.tolerances import TOLERANCE
from evictbench.stats.intervals import holm

if TYPE_CHECKING:
    from evictbench.store.published_number import Published


BY_SIZE = "is weighted by"
"""Words in the note of a mean whose tasks weigh by their number of documents."""


def against_published(folder: Path, published: Sequence[Published], tolerance: float = TOLERANCE) -> list[Finding]:
    """One finding for each run under `folder` and each published number about it.

    tolerance: of retention, in [0, 1]. Only "below" fails the gate, and not for a number that was read off a plot.
    Raises UserError if `folder` holds no results.
    """
    runs = arms(folder)
    scores = [entry for entry in published if is_score(entry)]
    refused: list[Finding] = []
    rows: list[_Row] = []
    for arm in runs:
        for entries in _about(arm, runs, scores):
            row = _row(arm, entries, runs, published)
            if isinstance(row, str):
                refused.append(_refused(arm, entries[0], row))
            else:
                rows.append(row)
    return [*_judged(rows, tolerance), *refused]


@dataclass(frozen=True)
class _Row:
    """A run and the numbers about it: one, or the two of a contradiction.

    here: the run's retention. low, high: the range of the paper's retention; there: its middle; spread: its standard
    error, 0 if the paper gives none.
    """

    arm: Arm
    entries: Sequence[Published]
    here: Retention
    low: float
    high: float
    there: float
    spread: float


def _about(arm: Arm, among: Sequence[Arm], published: Sequence[Published]) -> Iterator[Sequence[Published]]:
    """The numbers about a run, the two of a contradiction together. Numbers about other settings of the policy are left
    out if another run has these settings."""
    several: dict[str, list[Published]] = {}
    for entry in published:
        if not speaks_of(entry, arm):
            continue
        if other_settings(entry, arm) and any(
            speaks_of(entry, other) and not other_settings(entry, other) for other in among
        ):
            continue
        if entry.contradiction is None:
            yield [entry]
        else:
            several.setdefault(f"{entry.paper} {entry.contradiction} {entry.task}", []).append(entry)
    yield from several.values()


def _row(arm: Arm, entries: Sequence[Published], among: Sequence[Arm], published: Sequence[Published]) -> _Row | str:
    """A run and its numbers, ready to be judged, or a sentence that says why they cannot be."""
    first = entries[0]
    tasks, missing = tasks_of(first, arm)
    differs = other_settings(first, arm) + protocol_differs(first, arm, tasks)
    if missing:
        differs.append(f"tasks ({', '.join(missing)} not run here, part of the mean there)")
    if differs:
        return f"Not run as {_cited(first)} has it: {', '.join(differs)}."
    ranges = [_range(entry, published) for entry in entries]
    known = [bounds for bounds in ranges if bounds is not None]
    if not known:
        return (
            f"{_cited(first)} gives {first.value:g} and no score of the full cache beside it, so there is no retention."
        )
    full = full_beside(arm, among)
    if full is None:
        return (
            f"There is no run of the full cache beside {arm.cell}, {arm.run['suite']} on {arm.run['model']}: make one "
            "under the same protocol with --policy full."
        )
    here = retention(arm.documents, full, tasks, by_size=BY_SIZE in first.note)
    if here is None:
        return (
            f"The full cache scores nothing on the documents of {', '.join(tasks)} that both runs have, so there is "
            "no retention."
        )
    low, high = min(bounds[0] for bounds in known), max(bounds[1] for bounds in known)
    there = known[0][3] if len(known) == 1 else (low + high) / 2
    return _Row(arm, entries, here, low, high, there, max(bounds[2] for bounds in known))


def _judged(rows: Sequence[_Row], tolerance: float) -> Iterator[Finding]:
    below = holm([row.here.p_below(row.low - tolerance, row.spread) for row in rows])
    above = holm([row.here.p_above(row.high + tolerance, row.spread) for row in rows])
    within = f"{100 * tolerance:g} points"
    for row, p_below, p_above in zip(rows, below, above, strict=True):
        if p_below < LEVEL:
            yield _finding(row, "below", p_below, f"that is more than {within} below {_says(row)}")
            continue
        if p_above < LEVEL:
            yield _finding(row, "above", p_above, f"that is more than {within} above {_says(row)}")
            continue
        sides = row.here.p_above(row.low - tolerance, row.spread), row.here.p_below(row.high + tolerance, row.spread)
        if max(sides) < LEVEL:
            yield _finding(row, "reproduced", max(sides), f"that is within {within} of {_says(row)}")
        else:
            yield _finding(row, "too few samples", None, _needed(row, tolerance))


def _finding(row: _Row, status: Status, p: float | None, verdict: str) -> Finding:
    interval = row.here.interval()
    first = row.entries[0]
    plotted = all(entry.confidence == "plot" for entry in row.entries)
    kept = f"{_percent(row.here.value)} of the full cache's score is kept"
    parts = [kept if interval is None else f"{kept} (95%: {_percent(interval[0])} to {_percent(interval[1])})", verdict]
    if status == "below" and plotted:
        parts.append("that was read off a plot, so the gate does not fail on it")
    if silent := unstated(first):
        parts.append(f"the paper is not known to state its {' or '.join(silent)}")
    return Finding(
        status=status,
        cell=row.arm.cell,
        suite=first.suite,
        task=first.task,
        quantity="retention",
        here=row.here.value,
        there=row.there,
        difference=row.here.value - row.there,
        low=None if interval is None else interval[0] - row.there,
        high=None if interval is None else interval[1] - row.there,
        p=p,
        samples=row.here.documents,
        why="; ".join(parts) + ".",
        fails=status == "below" and not plotted,
    )


def _refused(arm: Arm, entry: Published, why: str) -> Finding:
    tasks, _ = tasks_of(entry, arm)
    return Finding(
        status="not comparable",
        cell=arm.cell,
        suite=entry.suite,
        task=entry.task,
        quantity="retention",
        here=None,
        there=None,
        difference=None,
        low=None,
        high=None,
        p=None,
        samples=sum(task in tasks for task, _ in arm.documents),
        why=why,
        fails=False,
    )


def _needed(row: _Row, tolerance: float) -> str:
    """A phrase that says how many documents are needed for a verdict."""
    count = row.here.documents
    needed = row.here.documents_needed(row.low - tolerance, row.high + tolerance, row.spread)
    unsure = f"{count} documents do not show whether that is within {100 * tolerance:g} points of {_says(row)}"
    if needed is None:
        return f"{unsure}, and no number of them would: the paper's own spread is too wide"
    enough = f"{needed} are enough in {100 * POWER:g}% of runs that are as the paper says"
    return f"{unsure}; {enough}" + (", so this one is at the edge" if needed <= count else "")


def _range(entry: Published, published: Sequence[Published]) -> tuple[float, float, float, float] | None:
    """The least and the largest retention that a printed number may stand for, its standard error, and the retention as
    printed; None if the paper gives no retention."""
    if entry.full:
        half = 0.5 * 10.0 ** -_decimals(entry, published, "value")
        value, full = entry.value, entry.full
        spread = (entry.spread or 0.0) / full
        return max(0.0, value - half) / (full + half), (value + half) / max(half, full - half), spread, value / full
    if entry.retention is not None:
        half = 0.5 * 10.0 ** -_decimals(entry, published, "retention")
        there = entry.retention / 100
        return max(0.0, there - half / 100), there + half / 100, 0.0, there
    return None


def _decimals(entry: Published, published: Sequence[Published], field: Literal["value", "retention"]) -> int:
    """Decimals that the table prints: the most that any of its numbers has, since 40.0 is read as 40."""
    table = entry.source.partition(", row")[0]
    fields = ("value", "full") if field == "value" else ("retention",)
    numbers = [
        getattr(other, name)
        for name in fields
        for other in (entry, *published)
        if (other.paper, other.version, other.unit) == (entry.paper, entry.version, entry.unit)
        and other.source.partition(", row")[0] == table
    ]
    return max(len(f"{number:.6f}".rstrip("0").partition(".")[2]) for number in numbers if number is not None)


def _says(row: _Row) -> str:
    """A phrase with the paper's retention, as a range if it is not known better, and its source."""
    sources = dict.fromkeys(_cited(entry) for entry in row.entries)
    low, high = _percent(row.low), _percent(row.high)
    amount = low if low == high else f"{low} to {high}, which is what is printed,"
    return f"the {amount} of {' and '.join(sources)}"


def _cited(entry: Published) -> str:
    return f"{entry.paper}{entry.version and ' '}{entry.version}, {entry.source}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
