"""Latency against a baseline: the time of a decode step over that of the full cache in the same trace.

The ratio can be compared between machines that do nothing else, and milliseconds cannot. The steps of a cell are cut
into stretches, and each stretch has the ratio of its medians. Stretches of the two sides are paired by their place. A
cell fails if the whole 95% interval of its rise lies above the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from evictbench.errors import UserError
from evictbench.gate.cells import cell_name
from evictbench.gate.finding import Finding
from evictbench.gate.tolerances import LATENCY_TOLERANCE
from evictbench.stats.paired import difference
from evictbench.store.files import visible_files
from evictbench.store.select import text_of
from evictbench.store.trace_files import DECODE, MADE_BY, OK, TRACE, is_trace, read_trace

if TYPE_CHECKING:
    import pandas as pd

STRETCHES = 16
"""Parts of a cell's decode, each a pair of one ratio here and one there."""

LATENCY = "latency"
"""The quantity of its findings: a decode step's time over the full cache's."""

ALIKE = ("weights", "dtype", "device", "prefill", "chunk", "new_tokens")
"""Fields of `made_by` in which two traces must be equal to be compared, beside the model."""

Key = tuple[str, str, int, int]
"""A policy, its budget, the context and the number of rows."""


@dataclass(frozen=True)
class Trace:
    """One trace.

    about: its trace.json. ratios: for each cell with a budget and each stretch, the logarithm of the step's time over
    the full cache's; None if the cell ran out of memory, empty if the full cache has no measurement at its context and
    rows.
    """

    folder: Path
    about: dict[str, Any]
    ratios: dict[Key, tuple[float, ...] | None]


def traces_in(folder: Path) -> list[Path]:
    """The folders of traces in a folder, which may be one itself."""
    return sorted(file.parent for file in visible_files(folder, TRACE))


def against_traces(here: Sequence[Path], there: Sequence[Path], tolerance: float = LATENCY_TOLERANCE) -> list[Finding]:
    """A finding about each cell of the traces in the folders `here`, against those in the folders `there`.

    tolerance: the rise of the ratio that passes, as a share. Raises UserError for a folder that is no trace, for traces
    of different models or machines, and for cells that only one side has.
    """
    theirs = [_read(folder) for folder in there]
    findings: list[Finding] = []
    for trace in map(_read, here):
        other = _counterpart(trace, theirs)
        lost = sorted(other.ratios.keys() - trace.ratios.keys())
        more = sorted(trace.ratios.keys() - other.ratios.keys())
        for keys, has, has_not in ((lost, other, trace), (more, trace, other)):
            if keys:
                raise UserError(
                    f"The trace in {has.folder} has {_said(keys[0])}, and that in {has_not.folder} has not."
                )
        findings += (_of_cell(key, trace, other, tolerance) for key in trace.ratios)
    return findings


def _read(folder: Path) -> Trace:
    if not is_trace(folder):
        raise UserError(f"{folder} is no trace: it holds no {TRACE}.")
    about, steps = read_trace(folder)
    steps = steps[steps["phase"] == DECODE]
    steps = steps.assign(budget=[text_of(value) for value in steps["budget"]])
    cells = dict(iter(steps.groupby(["policy", "budget", "context", "rows"], sort=False)))
    full = {key[2:]: part for key, part in cells.items() if key[1] == "none"}
    ratios: dict[Key, tuple[float, ...] | None] = {}
    for (policy, budget, context, rows), part in cells.items():
        key = (str(policy), str(budget), int(context), int(rows))
        if budget == "none":
            continue
        base = full.get((context, rows))
        if not (part["status"] == OK).all():
            ratios[key] = None
        elif base is None or not (base["status"] == OK).all():
            ratios[key] = ()
        else:
            ratios[key] = tuple(
                math.log(mine / whole) for mine, whole in zip(_stretches(part), _stretches(base), strict=False)
            )
    return Trace(folder, about, ratios)


def _stretches(steps: pd.DataFrame) -> Iterator[float]:
    """The median milliseconds of each stretch of the steps."""
    count = min(STRETCHES, len(steps))
    ordered = steps.sort_values("step")["ms"].to_numpy()
    import numpy as np

    medians = [float(np.median(part)) for part in np.array_split(ordered, count)]
    if not min(medians) > 0:
        raise UserError(f"A decode step of {steps['policy'].iloc[0]} takes no time at all: trace it again.")
    return iter(medians)


def _counterpart(trace: Trace, theirs: Sequence[Trace]) -> Trace:
    model = trace.about.get("model")
    same = [other for other in theirs if other.about.get("model") == model]
    if not same:
        models = ", ".join(sorted({str(other.about.get("model")) for other in theirs}))
        raise UserError(f"The trace in {trace.folder} is of {model}, and the baseline's are of {models}.")
    mine = trace.about.get(MADE_BY, {})
    apart = [[name for name in ALIKE if mine.get(name) != other.about.get(MADE_BY, {}).get(name)] for other in same]
    alike = [other for other, names in zip(same, apart, strict=True) if not names]
    if len(alike) > 1:
        raise UserError(f"The baseline has {len(alike)} traces like that in {trace.folder}: name one.")
    if not alike:
        names = min(apart, key=len)
        other = same[apart.index(names)]
        theirs_made = other.about.get(MADE_BY, {})
        what = "; ".join(f"{name} is {mine.get(name)} here and {theirs_made.get(name)} there" for name in names)
        raise UserError(f"The trace in {trace.folder} cannot be held against that in {other.folder}: {what}.")
    return alike[0]


def _of_cell(key: Key, trace: Trace, other: Trace, tolerance: float) -> Finding:
    here, there = trace.ratios[key], other.ratios[key]
    if here is None or there is None:
        lost = here is None and there is not None
        why = "Ran out of memory here, and not in the baseline." if lost else "The baseline ran out of memory."
        return _finding("failed" if lost else "not comparable", key, trace, why)
    if not here or not there:
        why = "The full cache has no measurement beside it: it ran out of memory, or was not traced."
        return _finding("not comparable", key, trace, why)
    sides = [{("", place): ratio for place, ratio in enumerate(ratios)} for ratios in (here, there)]
    apart = difference(sides[0], sides[1])
    assert apart is not None
    low = apart.value if apart.low is None and apart.documents > 1 else apart.low
    rise = math.expm1(apart.value)
    failed = low is not None and low > math.log1p(tolerance)
    why = f"A decode step takes {100 * rise:+.1f}% beside the full cache's, "
    why += (
        f"significantly more than the {100 * tolerance:g}% that are let pass."
        if failed
        else f"which does not show a rise beyond {100 * tolerance:g}%."
    )
    here_ratio, there_ratio = (math.exp(fmean(list(side.values())[: apart.documents])) for side in sides)
    return _finding(
        "failed" if failed else "passed",
        key,
        trace,
        why,
        (here_ratio, there_ratio, here_ratio - there_ratio),
        None if apart.low is None else there_ratio * math.expm1(apart.low),
        None if apart.high is None else there_ratio * math.expm1(apart.high),
        apart.documents,
    )


def _said(key: Key) -> str:
    policy, budget, context, rows = key
    return f"{policy} @ {budget} at {context} tokens, {rows} row{'s' if rows > 1 else ''}"


def _finding(
    status: Literal["passed", "failed", "not comparable"],
    key: Key,
    trace: Trace,
    why: str,
    numbers: tuple[float, float, float] | tuple[None, None, None] = (None, None, None),
    low: float | None = None,
    high: float | None = None,
    samples: int = 0,
) -> Finding:
    policy, budget, context, rows = key
    here, there, apart = numbers
    return Finding(
        status=status,
        cell=cell_name(policy, budget),
        suite=f"trace of {trace.about.get('model')}",
        task=f"{context} tokens, {rows} row{'s' if rows > 1 else ''}",
        quantity=LATENCY,
        here=here,
        there=there,
        difference=apart,
        low=low,
        high=high,
        p=None,
        samples=samples,
        why=why,
        fails=status == "failed",
    )
