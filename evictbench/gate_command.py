"""`evictbench gate`: ask, show what was found, write the files; say where they are and what to type next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from evictbench import gate_show
from evictbench.console import console_for, describe, say
from evictbench.errors import UserError
from evictbench.gate import Finding, Request, findings
from evictbench.gate_settings import EXACT_IDS, EXACT_KL
from evictbench.progress import Waiting


def gate_and_show(request: Request, as_json: bool = False, quiet: bool = False) -> int:
    """Ask, show what was found (quiet: the verdict and what fails), write the files; the exit code."""
    _check(request)
    with Waiting(console_for(stderr=True, quiet=quiet)) as waiting:
        found = findings(request, waiting.begin)
    words = console_for(stderr=as_json, quiet=quiet)
    describe(words, "gate", _rows(request))
    shown = gate_show.as_json if as_json else gate_show.in_short if quiet else gate_show.as_table
    print(shown(found))
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    for file, form, append in (
        (request.junit, gate_show.as_junit, False),
        (request.markdown, gate_show.as_markdown, False),
        (Path(summary) if summary else None, gate_show.as_markdown, True),
    ):
        if file is not None:
            _write(file, form(found), append)
            say(words, f"{'added' if append else 'written'} to {file}")
    say(words, f"next: {shlex.join(_next(request, found))}")
    return int(any(finding.fails for finding in found))


def _rows(request: Request) -> list[tuple[str, Sequence[str]]]:
    """What was asked, defaults spelled out."""
    points, share = f"{100 * request.tolerance:g} points", f"{100 * request.latency_tolerance:g}%"
    fails = []
    if request.exact:
        fails.append(f"a KL that differs by more than {EXACT_KL:g} nats, less than {EXACT_IDS:.0%} of equal answers")
    elif request.baseline is not None:
        fails.append(f"a drop in score of more than {points}, a decode step that takes over {share} more")
    if request.published:
        fails.append(f"retention more than {points} below a paper's")
    against = [] if request.baseline is None else [str(request.baseline)]
    return [
        ("runs", [" ".join([str(request.folder), *request.filters.options()])]),
        ("against", [*against, *(["the numbers of papers"] if request.published else [])]),
        ("samples", ["those that both have" if request.paired else "all"]),
        ("fails on", fails),
    ]


def _next(request: Request, found: Sequence[Finding]) -> list[str]:
    """How to look closer at what fails first, or at all of it: at the steps of a trace, at samples of a suite."""
    from evictbench.gate_latency import LATENCY, traces_in

    failing = [finding for finding in found if finding.fails] or list(found)
    if all(finding.quantity == LATENCY for finding in failing):
        traces = request.traces or traces_in(request.folder)
        return ["evictbench", "plot", str(traces[0])]
    suites = {finding.suite.partition(", ")[0] for finding in failing if finding.quantity != LATENCY}
    return ["evictbench", "report", str(request.folder), "--suite", ",".join(sorted(suites))]


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
    filters = request.filters
    if request.published and (filters.model or filters.task or filters.where):
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
