"""`evictbench report`: results in one HTML file that opens from the disk, asks no network and can be sent on."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench import plot
from evictbench.console import console_for, say
from evictbench.errors import UserError
from evictbench.plot_select import ALL, Filters
from evictbench.progress import Waiting

if TYPE_CHECKING:
    import pandas as pd

MOST_BYTES = 4_800_000
"""Of the file: what mail takes, and a phone opens. Prompts and answers get what the rest leaves."""


@dataclass(frozen=True)
class Request:
    """The options of `evictbench report`, as given.

    documents: of each task, so many are in the sample browser, evenly chosen; None is all that fit, 0 none. tokenizer:
    a folder, where the model's own tokenizer is not on this machine.
    """

    folder: Path
    traces: tuple[Path, ...] = ()
    out: Path = Path("results/report.html")
    title: str = "evictbench report"
    filters: Filters = ALL
    documents: int | None = None
    tokenizer: Path | None = None

    def of_runs(self) -> plot.Request:
        """The same filters for figures of runs."""
        return plot.Request(self.folder, filters=self.filters)


def report_and_show(request: Request, quiet: bool = False) -> int:
    """Write the file, and say what it warns of and, if not quiet, where it is; the exit code."""
    _check(request)
    with Waiting(console_for(stderr=True, quiet=quiet)) as waiting:
        page, warnings = build(request, waiting.begin)
        waiting.begin(f"writing {request.out}")
        data = page.encode("utf-8", errors="replace")
        _write(request.out, data)
    for sentence in warnings:
        print(f"warning: {sentence}", file=sys.stderr)
    words = console_for(stderr=False, quiet=quiet)
    say(words, f"written to {request.out} ({len(data) / 1e6:.2f} MB)")
    say(words, f"next: open it in a browser: python -m webbrowser {shlex.quote(str(request.out))}")
    return 0


def build(request: Request, phase: Callable[[str], None] = lambda _: None) -> tuple[str, list[str]]:
    """The page, and the sentences that it warns with. `phase` hears what takes a while."""
    phase(f"reading {request.folder}")
    from evictbench import report_figures, report_page, report_protocol, report_samples, report_tables, report_warnings

    samples = _chosen(request)
    phase("comparing policies and budgets")
    board = report_tables.leaderboard(samples)
    phase("drawing the figures")
    figures, refusals = report_figures.figures(request, samples)
    phase("holding protocols against each other")
    runs = report_protocol.groups(samples)
    warnings = [*report_warnings.warnings(samples, board), *report_protocol.warnings(runs), *refusals]
    render = partial(report_page.render, request.title, samples, board, figures, runs, warnings)
    room = MOST_BYTES - len(render(report_samples.Browser()).encode(errors="replace"))
    phase("choosing prompts and answers to show")
    browser = report_samples.browser(samples, request.documents, request.tokenizer, room)
    page = render(browser)
    return page, [warning.text for warning in warnings] + browser.notes


def _chosen(request: Request) -> pd.DataFrame:
    from evictbench.plot_select import asked, choose
    from evictbench.results_frame import read_results

    return choose(read_results(request.folder, text=False), asked(request.filters))


def _check(request: Request) -> None:
    """What can be known before anything is read."""
    from evictbench.trace_schema import is_trace

    if request.documents is not None and request.documents < 0:
        raise UserError(f"--documents {request.documents} is no number of documents: 0 leaves the browser empty.")
    if is_trace(request.folder):
        raise UserError(f"{request.folder} is a trace: name the folder of runs, and the trace with --trace.")
    for trace in request.traces:
        if not is_trace(trace):
            raise UserError(f"{trace} is no trace: it holds no trace.json.")
    if request.tokenizer is not None and not (request.tokenizer / "tokenizer.json").is_file():
        raise UserError(f"The folder {request.tokenizer} holds no tokenizer.json.")
    out = request.out
    if out.is_dir():
        raise UserError(f"{out} is a folder; the report is a file: --out {out / 'report.html'}.")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise UserError(f"{parent} is a file; the report needs a folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"The report cannot be written to {out}: no permission in {parent}.")


def _write(out: Path, data: bytes) -> None:
    """Replace the file at once, or leave it as it was."""
    name: str | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{out.name}-", dir=out.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, out)
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise UserError(f"The report cannot be written to {out}: {error.strerror or error}.") from error
