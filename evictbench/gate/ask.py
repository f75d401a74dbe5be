"""The questions of a gate.

    --published         does a policy keep the share of the full cache's score that a paper reports?
    --baseline          for code that may change results: has a score dropped, or a cost risen?
    --baseline --exact  for code that may not: is every result the same?

Exit code 0: passed. 1: something fails. 2: the runs cannot be used, and a sentence says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.gate import cells, latency
from evictbench.gate.baseline import above_full, against_baseline
from evictbench.gate.exact import against_itself
from evictbench.gate.finding import Finding, GateRequest
from evictbench.gate.seen import with_entries_seen
from evictbench.store.frame import read_results
from evictbench.store.run_folder import RUN
from evictbench.store.select import choose, wanted_values

if TYPE_CHECKING:
    import pandas as pd


def findings(request: GateRequest, phase: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """The findings of everything that the request asks.

    phase: called with a few words before each step that takes a while. Raises UserError if the runs cannot be used.
    """
    answers = [*_against_baseline(request, phase), *_against_papers(request, phase)]
    if not answers:
        raise UserError(f"No run in {request.folder} is of a policy, model and suite that a published number is about.")
    return with_entries_seen(answers, lambda: _chosen(request, request.folder, phase))


def _against_baseline(request: GateRequest, phase: Callable[[str], None]) -> Iterator[Finding]:
    baseline = request.baseline
    if baseline is None:
        return
    if not baseline.is_dir():
        raise UserError(f"There is no baseline {baseline}: make one with evictbench run --out, and keep it.")
    cells.folders_apart(request.folder, baseline)
    traces = request.traces or tuple(latency.traces_in(request.folder))
    other_traces = request.baseline_traces or tuple(latency.traces_in(baseline))
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
        yield from latency.against_traces(traces, other_traces, request.latency_tolerance)


def _runs_against(request: GateRequest, baseline: Path, phase: Callable[[str], None]) -> Iterator[Finding]:
    here, there = _chosen(request, request.folder, phase), _chosen(request, baseline, phase)
    phase(f"comparing them with those in {baseline}")
    pairs = cells.pairs(here, there, exact=request.exact, in_common=request.paired, trainings=request.trainings)
    if request.exact:
        yield from against_itself(pairs)
    else:
        yield from against_baseline(pairs, request.tolerance)
        yield from above_full([pair.here for pair in pairs], here)


def _against_papers(request: GateRequest, phase: Callable[[str], None]) -> Iterator[Finding]:
    """Findings about the chosen cells. The full cache's runs beside them are used whether or not they are chosen."""
    if not request.published:
        return
    from evictbench.gate.published import against_published
    from evictbench.store.published import read_published

    chosen = set(_chosen(request, request.folder, phase)["fingerprint"].astype(str))
    phase("comparing them with the numbers of papers")
    yield from against_published(
        request.folder,
        read_published(),
        request.tolerance,
        trainings=request.trainings,
        bases=_bases(request),
        chosen=chosen,
    )


def _bases(request: GateRequest) -> dict[str, str]:
    """--base as a mapping from models to their bases."""
    bases: dict[str, str] = {}
    for given in request.base:
        model, equals, base = (part.strip() for part in given.partition("="))
        if not (model and equals and base):
            raise UserError(f"--base takes MODEL=BASE, a fine-tuned model and what it was made from, not {given!r}.")
        if bases.setdefault(model, base) != base:
            raise UserError(f"--base names two bases of {model}: {bases[model]} and {base}.")
    return bases


def _chosen(request: GateRequest, folder: Path, phase: Callable[[str], None]) -> pd.DataFrame:
    phase(f"reading the runs in {folder}")
    return choose(read_results(folder, text=False), wanted_values(request.filters))


def _holds_runs(folder: Path) -> bool:
    return next(folder.rglob(RUN), None) is not None
