"""Was a paper's number reproduced? Retention here, with its interval, against retention there.

Retention is the score over the full cache's on the same documents; for a fine-tuned model, over the full cache of the
model that it was made from. Scores are not compared, because prompts, graders and weights move a score and the full
cache's alike. A paper's retention is its value over its full cache's, or as it is printed. Both are known only as they
are printed, so it is a range, which holds both numbers if a paper contradicts itself. The tolerance lies around the
range. Where a paper has no full cache beside a number, the score itself is compared, and the gate does not fail on it.

    below           the true retention is below the range by more than the tolerance: one-sided 5%, with Holm's
                    correction over all rows, so that any false verdict in a whole gate is that rare
    above           the true retention is above the range by more than the tolerance: likewise
    reproduced      it is within the tolerance on both sides, each at 5%, of this row alone
    too few samples no verdict is possible; the finding says with how many documents a run that is as the paper says
                    would be "reproduced" four times in five
    not comparable  a protocol field that the paper states differs here, or something else was trained, or a number is
                    missing that it takes

A published spread counts as the standard error of the number. Without one, the number is taken as exact to its printed
digits, though it was measured on a limited number of documents too. Several trainings here count with the standard
error of their mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Literal

from evictbench.gate.arms import Arm, Documents, arms, read_runs
from evictbench.gate.cells import cell_name
from evictbench.gate.finding import Finding, Status
from evictbench.gate.match import differences, other_settings, speaks_of, tasks_of, unstated, weights_of
from evictbench.gate.retention import LEVEL, POWER, Retention, retention
from evictbench.gate.tolerances import TOLERANCE
from evictbench.gate.wanted import JOINT, RETENTION, is_score, wanted
from evictbench.stats.intervals import holm

if TYPE_CHECKING:
    from evictbench.gate.arms import Run
    from evictbench.store.published_number import Published

SCALES = {"percent": 100.0, "share": 1.0}
"""Units of scores, and what a score of 1 is in them."""


def against_published(
    folder: Path,
    published: Sequence[Published],
    tolerance: float = TOLERANCE,
    *,
    trainings: bool = False,
    bases: Mapping[str, str] | None = None,
    chosen: Collection[str] | None = None,
) -> list[Finding]:
    """One finding for each arm of the runs under `folder` and each published number about it.

    tolerance: of retention, in [0, 1]. trainings: whether runs that differ in their weights alone are one arm, whose
    score is their mean. bases: models that were fine-tuned elsewhere, and the model that each speaks as. chosen:
    fingerprints of the runs that are asked about, None for all; other full caches are used all the same. Only "below"
    fails the gate, and neither for a number that was read off a plot nor for a score without a full cache beside it.
    Raises UserError if `folder` holds no results.
    """
    rows, refused = matched(read_runs(folder, bases), published, trainings, chosen)
    return [*_judged(rows, tolerance), *refused]


def matched(
    runs: Sequence[Run], published: Sequence[Published], trainings: bool = False, chosen: Collection[str] | None = None
) -> tuple[list[_Row], list[Finding]]:
    """Each arm with the numbers that it is held against, and a finding for each that it cannot be held against.

    The arguments are those of `against_published`.
    """
    scores = [entry for entry in published if is_score(entry)]
    joint = dict.fromkeys(entry.suite for entry in scores if JOINT in entry.suite)
    every = arms(runs, joint, trainings)
    of_policy: dict[str, list[Published]] = {}
    for entry in scores:
        of_policy.setdefault(wanted(entry).policy_name, []).append(entry)
    refused: list[Finding] = []
    rows: list[_Row] = []
    for arm in every:
        if chosen is not None and not arm.fingerprints <= set(chosen):
            continue
        for entries in _about(arm, every, of_policy.get(arm.first.columns["policy_name"], [])):
            row = _row(arm, entries, runs, published)
            if isinstance(row, str):
                refused.append(_refused(arm, entries[0], row))
            else:
                rows.append(row)
    return rows, refused


@dataclass(frozen=True)
class _Row:
    """An arm and the numbers about it: one, or the two of a contradiction.

    quantity: what is compared. here: the arm's retention; of a score, the retention of a full cache that is always
    right. low, high: the range of the paper's; there: its middle; spread: its standard error, 0 if the paper gives
    none. deviation: the standard deviation of the score here over trainings, None for fewer than two.
    """

    arm: Arm
    entries: Sequence[Published]
    here: Retention
    low: float
    high: float
    there: float
    spread: float
    quantity: Literal["retention", "score"] = "retention"
    deviation: float | None = None

    @property
    def error(self) -> float:
        """The standard error of the difference that is not of documents: the paper's, and the trainings' here."""
        own = 0.0 if self.deviation is None else self.deviation / math.sqrt(len(self.arm.trainings)) / self.here.full
        return math.hypot(self.spread, own)


def _about(arm: Arm, among: Sequence[Arm], published: Sequence[Published]) -> Iterator[Sequence[Published]]:
    """The numbers about an arm, the two of a contradiction together. A number that is not as the arm in something is
    left out if another arm has its settings, or if the paper has one beside it that is as the arm in all."""
    about = [(entry, differences(entry, arm)) for entry in published if speaks_of(entry, arm)]
    exact = {_beside(entry) for entry, differs in about if not differs}
    several: dict[str, list[Published]] = {}
    for entry, differs in about:
        if differs and _beside(entry) in exact:
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


def _beside(entry: Published) -> tuple[str, ...]:
    """What a number has in common with those of its paper that differ from it in protocol, settings or training."""
    return entry.paper, entry.suite, entry.task, entry.metric


def _row(arm: Arm, entries: Sequence[Published], among: Sequence[Run], published: Sequence[Published]) -> _Row | str:
    """An arm and its numbers, ready to be judged, or a sentence that says why they cannot be."""
    first = entries[0]
    if differs := differences(first, arm):
        return f"Not run as {_cited(first)} has it: {', '.join(differs)}."
    parts, _ = tasks_of(first, arm)
    tasks = [task for own in parts for task in own]
    known = [bounds for entry in entries if (bounds := _range(entry, published)) is not None]
    quantity: Literal["retention", "score"] = "retention"
    if known:
        full = arm.full_beside(among)
        if full is None:
            return _no_full(arm)
    else:
        quantity = "score"
        full = dict.fromkeys(arm.documents, 1.0)
        known = [_score_range(entry, published) for entry in entries]

    here = _kept(first, parts, arm.documents, full)
    if here is None:
        return (
            f"The full cache scores nothing on the documents of {', '.join(tasks)} that both runs have, so there is "
            "no retention."
        )
    low, high = min(bounds[0] for bounds in known), max(bounds[1] for bounds in known)
    there = known[0][3] if len(known) == 1 else (low + high) / 2
    each = [_kept(first, parts, documents, full) for documents in arm.of_trainings]
    own = [found.score for found in each if found is not None]
    deviation = stdev(own) if len(own) > 1 else None
    return _Row(arm, entries, here, low, high, there, max(bounds[2] for bounds in known), quantity, deviation)


def _kept(entry: Published, parts: Sequence[Sequence[str]], documents: Documents, full: Documents) -> Retention | None:
    """The retention over the tasks of an entry, which weigh as its paper has it."""
    count = Counter(task for task, _ in documents.keys() & full.keys())
    tasks = [task for own in parts for task in own]
    return retention(documents, full, tasks, weights_of(entry, parts, count))


def _no_full(arm: Arm) -> str:
    run = arm.first
    where = f"{arm.cell}, {arm.suite} on {run.columns['model']}"
    if run.base is None:
        return f"There is no run of the full cache beside {where}: make one under the same protocol with --policy full."
    return (
        f"{run.columns['model']} was fine-tuned from {run.base}, whose full cache was not run beside {where}: make it "
        f"under the same protocol with --policy full --model {run.base}."
    )


def _judged(rows: Sequence[_Row], tolerance: float) -> Iterator[Finding]:
    below = holm([row.here.p_below(row.low - tolerance, row.error) for row in rows])
    above = holm([row.here.p_above(row.high + tolerance, row.error) for row in rows])
    within = f"{100 * tolerance:g} points"
    for row, p_below, p_above in zip(rows, below, above, strict=True):
        if p_below < LEVEL:
            yield _finding(row, "below", p_below, f"that is more than {within} below {_says(row)}")
            continue
        if p_above < LEVEL:
            yield _finding(row, "above", p_above, f"that is more than {within} above {_says(row)}")
            continue
        sides = row.here.p_above(row.low - tolerance, row.error), row.here.p_below(row.high + tolerance, row.error)
        if max(sides) < LEVEL:
            yield _finding(row, "reproduced", max(sides), f"that is within {within} of {_says(row)}")
        else:
            yield _finding(row, "too few samples", None, _needed(row, tolerance))


def _finding(row: _Row, status: Status, p: float | None, verdict: str) -> Finding:
    interval = row.here.interval()
    first = row.entries[0]
    plotted = all(entry.confidence == "plot" for entry in row.entries)
    of_base = "" if row.arm.first.base is None else f" {row.arm.first.base},"
    if row.quantity == "score":
        kept = f"the score is {_percent(row.here.value)}"
    elif of_base:
        kept = f"{_percent(row.here.value)} of the score of the base model's,{of_base} full cache is kept"
    else:
        kept = f"{_percent(row.here.value)} of the full cache's score is kept"
    parts = [kept if interval is None else f"{kept} (95%: {_percent(interval[0])} to {_percent(interval[1])})", verdict]
    if status == "below" and plotted:
        parts.append("that was read off a plot, so the gate does not fail on it")
    if row.quantity == "score":
        parts.append("the paper has no full cache beside it, so scores are compared and the gate does not fail on it")
    if row.deviation is not None:
        trainings = len(row.arm.trainings)
        parts.append(
            f"the mean of {trainings} trainings, whose scores' standard deviation is {_percent(row.deviation)}"
        )
    if silent := unstated(first):
        parts.append(f"the paper is not known to state its {' or '.join(silent)}")
    return Finding(
        status=status,
        cell=_named(row.arm, first),
        suite=row.arm.suite,
        task=first.task,
        quantity=row.quantity,
        here=row.here.value,
        there=row.there,
        difference=row.here.value - row.there,
        low=None if interval is None else interval[0] - row.there,
        high=None if interval is None else interval[1] - row.there,
        p=p,
        samples=row.here.documents,
        why="; ".join(parts) + ".",
        fails=status == "below" and not plotted and row.quantity == "retention",
        trainings=len(row.arm.trainings),
        deviation=row.deviation,
    )


def _named(arm: Arm, entry: Published) -> str:
    """The arm's cell, under the paper's own name for its policy where it has one ("StreamingLLM+ @ 2048")."""
    return cell_name(entry.policy, arm.first.columns["budget"]) if entry.runs_as else arm.cell


def _refused(arm: Arm, entry: Published, why: str) -> Finding:
    tasks = {task for own in tasks_of(entry, arm)[0] for task in own}
    return Finding(
        status="not comparable",
        cell=_named(arm, entry),
        suite=arm.suite,
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
        trainings=len(arm.trainings),
    )


def _needed(row: _Row, tolerance: float) -> str:
    """A phrase that says how many documents are needed for a verdict."""
    count = row.here.documents
    needed = row.here.documents_needed(row.low - tolerance, row.high + tolerance, row.error)
    unsure = f"{count} documents do not show whether that is within {100 * tolerance:g} points of {_says(row)}"
    if needed is None:
        wide = "the paper's own spread is too wide" if row.deviation is None else "trainings differ too much"
        return f"{unsure}, and no number of them would: {wide}"
    enough = f"{needed} are enough in {100 * POWER:g}% of runs that are as the paper says"
    return f"{unsure}; {enough}" + (", so this one is at the edge" if needed <= count else "")


def _range(entry: Published, published: Sequence[Published]) -> tuple[float, float, float, float] | None:
    """The least and the largest retention that a printed number may stand for, its standard error, and the retention as
    printed; None if the paper gives no retention."""
    if entry.metric == RETENTION:
        return _score_range(entry, published)
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


def _score_range(entry: Published, published: Sequence[Published]) -> tuple[float, float, float, float]:
    """`_range`, of a score, in [0, 1]."""
    half, scale = 0.5 * 10.0 ** -_decimals(entry, published, "value"), SCALES[entry.unit]
    spread = (entry.spread or 0.0) / scale
    return max(0.0, entry.value - half) / scale, (entry.value + half) / scale, spread, entry.value / scale


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
