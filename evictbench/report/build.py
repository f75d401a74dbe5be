"""`evictbench report`: results in one HTML file that opens from the disk, asks no network and can be sent on."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.report.request import Request
from evictbench.terminal.console import console_for, say
from evictbench.terminal.waiting import Waiting

if TYPE_CHECKING:
    import pandas as pd


MOST_BYTES = 4_800_000
"""Of the file: what mail takes, and a phone opens. Prompts and answers get what the rest leaves."""


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
    from evictbench.report.figures import figures
    from evictbench.report.page import render
    from evictbench.report.protocol import groups
    from evictbench.report.protocol import warnings as warnings_of_protocol
    from evictbench.report.samples import Browser, browser
    from evictbench.report.tables import leaderboard
    from evictbench.report.warnings import warnings as warnings_of_numbers

    samples = _chosen(request)
    phase("comparing policies and budgets")
    board = leaderboard(samples)
    phase("drawing the figures")
    drawn, refusals = figures(request, samples)
    phase("holding protocols against each other")
    runs = groups(samples)
    warnings = [*warnings_of_numbers(samples, board), *warnings_of_protocol(runs), *refusals]
    rendered = partial(render, request.title, samples, board, drawn, runs, warnings)
    room = MOST_BYTES - len(rendered(Browser()).encode(errors="replace"))
    phase("choosing prompts and answers to show")
    shown = browser(samples, request.documents, request.tokenizer, room)
    return rendered(shown), [warning.text for warning in warnings] + shown.notes


def _chosen(request: Request) -> pd.DataFrame:
    from evictbench.store.frame import read_results
    from evictbench.store.select import asked, choose

    return choose(read_results(request.folder, text=False), asked(request.filters))


def _check(request: Request) -> None:
    """What can be known before anything is read."""
    from evictbench.store.trace_files import is_trace

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
