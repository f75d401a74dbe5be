"""What a gate asks of runs: do they still hold.

    --published         is what a paper reports of a policy found here, as a share of the full cache's score?
    --baseline          for code that is meant to change a result: has a score dropped, or a cost risen?
    --baseline --exact  for code that is not: is every result the same?

Exit code 0: passed. 1: something fails. 2: the runs cannot be used, and a sentence says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from evictbench.errors import UserError
from evictbench.gate_settings import LATENCY_TOLERANCE, TOLERANCE
from evictbench.plot_select import ALL, Filters

if TYPE_CHECKING:
    import pandas as pd

Status = Literal["passed", "failed", "warning", "reproduced", "below", "above", "not comparable", "too few samples"]


@dataclass(frozen=True)
class Finding:
    """One question asked of one cell, and its answer.

    cell: policy @ budget ("h2o @ 256", "full"). quantity: "score", "kl", "ids" (the share of samples with equal
    tokens), "occupancy", "bytes", "latency" (a step's time over the full cache's), "retention", ... here, there: its
    value in the runs, and in what they are held against, in its own unit; None where there is none. difference: here -
    there (KL that must be equal: the largest of any text or part of it), low and high: its 95% interval. p: of the test
    that decided, corrected for the number of cells. samples: documents that it rests on. why: one sentence. fails: the
    gate is not passed because of this. finds: the true change for the worse that would have been found in 80 of 100
    cases, where that is known.
    """

    status: Status
    cell: str
    suite: str
    task: str
    quantity: str
    here: float | None
    there: float | None
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    samples: int
    why: str
    fails: bool
    finds: float | None = None


@dataclass(frozen=True)
class Request:
    """The options of `evictbench gate`, as given. traces, baseline_traces: none for those in the two folders."""

    folder: Path
    published: bool = False
    baseline: Path | None = None
    exact: bool = False
    paired: bool = False
    tolerance: float = TOLERANCE
    latency_tolerance: float = LATENCY_TOLERANCE
    traces: tuple[Path, ...] = ()
    baseline_traces: tuple[Path, ...] = ()
    filters: Filters = ALL
    junit: Path | None = None
    markdown: Path | None = None


def findings(request: Request, phase: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Everything that the request asks; UserError where the runs cannot be used for it. `phase` hears what takes a
    while."""
    found = [*_against_baseline(request, phase), *_against_papers(request, phase)]
    if not found:
        raise UserError(f"No run in {request.folder} is of a policy, model and suite that a published number is about.")
    return found


def _against_baseline(request: Request, phase: Callable[[str], None]) -> Iterator[Finding]:
    baseline = request.baseline
    if baseline is None:
        return
    from evictbench import gate_cells, gate_latency

    if not baseline.is_dir():
        raise UserError(f"There is no baseline {baseline}: make one with evictbench run --out, and keep it.")
    gate_cells.folders_apart(request.folder, baseline)
    traces = request.traces or tuple(gate_latency.traces_in(request.folder))
    other_traces = request.baseline_traces or tuple(gate_latency.traces_in(baseline))
    if bool(traces) != bool(other_traces) and not request.exact:
        side = baseline if traces else request.folder
        raise UserError(
            f"There is a trace on one side alone, and none in {side}: name it with "
            f"{'--baseline-trace' if traces else '--trace'}, or keep traces in a folder apart."
        )
    only_traces = not any(_holds_runs(folder) for folder in (request.folder, baseline)) and traces and not request.exact
    if not only_traces:
        yield from _runs_against(request, baseline, phase)
    if traces and not request.exact:
        phase("comparing the steps of traces")
        yield from gate_latency.against_traces(traces, other_traces, request.latency_tolerance)


def _runs_against(request: Request, baseline: Path, phase: Callable[[str], None]) -> Iterator[Finding]:
    from evictbench import gate_baseline, gate_cells, gate_exact

    here, there = _chosen(request, request.folder, phase), _chosen(request, baseline, phase)
    phase(f"comparing them with those in {baseline}")
    found = gate_cells.pairs(here, there, exact=request.exact, in_common=request.paired)
    if request.exact:
        yield from gate_exact.against_itself(found)
    else:
        yield from gate_baseline.against_baseline(found, request.tolerance)
        yield from gate_baseline.above_full([pair.here for pair in found], here)


def _against_papers(request: Request, phase: Callable[[str], None]) -> Iterator[Finding]:
    """Of the cells asked for; the full cache's beside them is taken whether it is asked for or not."""
    if not request.published:
        return
    from evictbench.gate_cells import cells_of
    from evictbench.gate_published import against_published
    from evictbench.plot_select import asked
    from evictbench.published import read_published

    cells = {cell.name for cell in cells_of(_chosen(request, request.folder, phase))}
    suites = asked(request.filters).get("suite")
    phase("comparing them with the numbers of papers")
    for finding in against_published(request.folder, read_published(), request.tolerance):
        if finding.cell in cells and (suites is None or finding.suite in suites):
            yield finding


def _chosen(request: Request, folder: Path, phase: Callable[[str], None]) -> pd.DataFrame:
    phase(f"reading the runs in {folder}")
    from evictbench.plot_select import asked, choose
    from evictbench.results_frame import read_results

    return choose(read_results(folder, text=False), asked(request.filters))


def _holds_runs(folder: Path) -> bool:
    from evictbench.records import RUN

    return next(folder.rglob(RUN), None) is not None
