"""`evictbench gate`: do these runs still hold, and what is asked of them.

    --published         is what a paper reports of a policy found here, as a share of the full cache's score?
    --baseline          for code that is meant to change a result: has a score dropped, or a cost risen?
    --baseline --exact  for code that is not: is every result the same?

Exit code 0: passed. 1: something fails. 2: the runs cannot be used, and a sentence says why.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from evictbench.errors import UserError
from evictbench.gate_settings import LATENCY_TOLERANCE, TOLERANCE

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
    suite: str | None = None
    model: str | None = None
    task: str | None = None
    policy: str | None = None
    budget: str | None = None
    where: tuple[str, ...] = ()
    junit: Path | None = None
    markdown: Path | None = None


def gate_and_show(request: Request, as_json: bool = False, quiet: bool = False) -> int:
    """Ask, show what was found (quiet: the verdict and what fails), write the files; the exit code."""
    from evictbench import gate_show

    _check(request)
    found = findings(request)
    shown = gate_show.as_json if as_json else gate_show.in_short if quiet else gate_show.as_table
    print(shown(found))
    if request.junit is not None:
        _write(request.junit, gate_show.as_junit(found))
    if request.markdown is not None:
        _write(request.markdown, gate_show.as_markdown(found))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        _write(Path(summary), gate_show.as_markdown(found), append=True)
    return int(any(finding.fails for finding in found))


def findings(request: Request) -> list[Finding]:
    """Everything that the request asks; UserError where the runs cannot be used for it."""
    found = [*_against_baseline(request), *_against_papers(request)]
    if not found:
        raise UserError(f"No run in {request.folder} is of a policy, model and suite that a published number is about.")
    return found


def _against_baseline(request: Request) -> Iterator[Finding]:
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
        yield from _runs_against(request, baseline)
    if traces and not request.exact:
        yield from gate_latency.against_traces(traces, other_traces, request.latency_tolerance)


def _runs_against(request: Request, baseline: Path) -> Iterator[Finding]:
    from evictbench import gate_baseline, gate_cells, gate_exact

    here, there = _chosen(request, request.folder), _chosen(request, baseline)
    found = gate_cells.pairs(here, there, exact=request.exact, in_common=request.paired)
    if request.exact:
        yield from gate_exact.against_itself(found)
    else:
        yield from gate_baseline.against_baseline(found, request.tolerance)
        yield from gate_baseline.above_full([pair.here for pair in found], here)


def _against_papers(request: Request) -> Iterator[Finding]:
    """Of the cells asked for; the full cache's beside them is taken whether it is asked for or not."""
    if not request.published:
        return
    from evictbench.gate_cells import cells_of
    from evictbench.gate_published import against_published
    from evictbench.plot_select import asked
    from evictbench.published import read_published

    cells = {cell.name for cell in cells_of(_chosen(request, request.folder))}
    suites = asked(request).get("suite")
    for finding in against_published(request.folder, read_published(), request.tolerance):
        if finding.cell in cells and (suites is None or finding.suite in suites):
            yield finding


def _chosen(request: Request, folder: Path) -> pd.DataFrame:
    from evictbench.plot_select import asked, choose
    from evictbench.results_frame import read_results

    return choose(read_results(folder, text=False), asked(request))


def _holds_runs(folder: Path) -> bool:
    from evictbench.records import RUN

    return next(folder.rglob(RUN), None) is not None


def _check(request: Request) -> None:
    """What can be known before anything is read."""
    if not request.folder.is_dir():
        raise UserError(f"There is no folder {request.folder}.")
    if request.baseline is None:
        for option, given in {
            "--exact": request.exact,
            "--paired": request.paired,
            "--trace": request.traces,
            "--baseline-trace": request.baseline_traces,
        }.items():
            if given:
                raise UserError(f"{option} is about a baseline: name one with --baseline.")
        if not request.published:
            raise UserError("A gate holds runs against something: --published, or --baseline FOLDER.")
    if request.published and (request.model or request.task or request.where):
        raise UserError("--model, --task and --where do not go with --published: name the folder of these runs.")
    if not 0 <= request.tolerance < 1:
        raise UserError(f"--tolerance is a drop in score from 0 to 1 (0.02 is two points), not {request.tolerance:g}.")
    if not request.latency_tolerance >= 0:
        raise UserError(f"--latency-tolerance is a share from 0 up (0.1 is 10%), not {request.latency_tolerance:g}.")
    for file in filter(None, (request.junit, request.markdown)):
        if file.is_dir():
            raise UserError(f"{file} is a folder, and what is written is a file.")
        parent = next(folder for folder in file.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(f"{file} cannot be written: {parent} is a file, or gives no permission.")


def _write(file: Path, text: str, append: bool = False) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a" if append else "w", encoding="utf-8") as out:
            out.write(text if text.endswith("\n") else text + "\n")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}.") from error
