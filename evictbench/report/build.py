"""`evictbench report`: results in one HTML file that opens from the disk, asks no network and can be sent on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.report.figures import figures
from evictbench.report.page import render
from evictbench.report.protocol import groups
from evictbench.report.protocol import warnings as protocol_warnings
from evictbench.report.request import ReportRequest
from evictbench.report.samples import Browser, browser
from evictbench.report.tables import leaderboard
from evictbench.report.warnings import warnings as number_warnings
from evictbench.store.files import check_file, writing
from evictbench.store.frame import read_results
from evictbench.store.select import choose, wanted_values
from evictbench.store.trace_files import is_trace
from evictbench.terminal.console import console_for, say
from evictbench.terminal.waiting import Waiting

if TYPE_CHECKING:
    import pandas as pd


MOST_BYTES = 4_800_000
"""Size of the file that mail takes and a phone opens. Prompts and answers get the room that the rest leaves."""


def report_and_show(request: ReportRequest, quiet: bool = False) -> int:
    """Write the file, print its warnings and, unless quiet, where it is. Returns the exit code."""
    _check(request)
    with Waiting(console_for(stderr=True, quiet=quiet)) as waiting:
        page, warnings = build(request, waiting.begin)
        waiting.begin(f"writing {request.out}")
        data = page.encode("utf-8", errors="replace")
        with writing(request.out) as file:
            file.write_bytes(data)
    for sentence in warnings:
        print(f"warning: {sentence}", file=sys.stderr)
    console = console_for(stderr=False, quiet=quiet)
    say(console, f"written to {request.out} ({len(data) / 1e6:.2f} MB)")
    say(console, f"next: open it in a browser: python -m webbrowser {shlex.quote(str(request.out))}")
    return 0


def build(request: ReportRequest, phase: Callable[[str], None] = lambda _: None) -> tuple[str, list[str]]:
    """The page and the sentences of its warnings. phase: called with a few words before a step that takes a while."""
    phase(f"reading {request.folder}")
    samples = _chosen(request)
    phase("comparing policies and budgets")
    board = leaderboard(samples)
    phase("drawing the figures")
    drawn, refusals = figures(request, samples)
    phase("holding protocols against each other")
    runs = groups(samples)
    warnings = [*number_warnings(samples, board), *protocol_warnings(runs), *refusals]
    rendered = partial(render, request.title, samples, board, drawn, runs, warnings)
    room = MOST_BYTES - len(rendered(Browser()).encode(errors="replace"))
    phase("choosing prompts and answers to show")
    shown = browser(samples, request.documents, request.tokenizer, room)
    return rendered(shown), [warning.text for warning in warnings] + shown.notes


def _chosen(request: ReportRequest) -> pd.DataFrame:
    return choose(read_results(request.folder, text=False), wanted_values(request.filters))


def _check(request: ReportRequest) -> None:
    """Raise UserError for options that cannot work, before anything is read."""
    if request.documents is not None and request.documents < 0:
        raise UserError(f"--documents {request.documents} is no number of documents: 0 leaves the browser empty.")
    if is_trace(request.folder):
        raise UserError(f"{request.folder} is a trace: name the folder of runs, and the trace with --trace.")
    for trace in request.traces:
        if not is_trace(trace):
            raise UserError(f"{trace} is no trace: it holds no trace.json.")
    if request.tokenizer is not None and not (request.tokenizer / "tokenizer.json").is_file():
        raise UserError(f"The folder {request.tokenizer} holds no tokenizer.json.")
    check_file(request.out, "The report")
