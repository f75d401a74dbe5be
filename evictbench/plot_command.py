"""`evictbench plot`: write the pictures, or print their numbers; say where they are and what to type next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from evictbench import plot_print
from evictbench.console import console_for, say
from evictbench.errors import UserError
from evictbench.plot import OF_RUNS, OF_TRACES, PICTURES, Drawing, Request, drawings
from evictbench.plot_select import listed
from evictbench.progress import Waiting
from evictbench.registry import unknown
from evictbench.trace_schema import is_trace

RUNS = Path("results/runs")
"""Where runs lie if nobody says otherwise."""


def plot_and_show(request: Request, as_json: bool = False, quiet: bool = False) -> int:
    """Write the pictures or print the numbers, as JSON if need be; the exit code. quiet: not where pictures went."""
    forms = _formats(request.format)
    names = _figures(request)
    texts = [form for form in forms if form in plot_print.TEXTS]
    pictures = [] if as_json else [form for form in forms if form in PICTURES]
    if pictures:
        _check_out(request.out)
    files: list[Path] = []
    with Waiting(console_for(stderr=True, quiet=quiet)) as waiting:
        waiting.begin(f"reading {request.folder}")
        found = list(drawings(request, names, _warn))
        for number, drawing in enumerate(found if pictures else (), start=1):
            waiting.begin(f"drawing {drawing.name}, {number} of {len(found)}")
            files += _write(drawing, pictures, request.out)
    printed = [
        drawing
        for number, drawing in enumerate(found)
        if not any(drawing.numbers.equals(earlier.numbers) for earlier in found[:number])
    ]
    if as_json:
        print(plot_print.as_json([(drawing.name, drawing.title, drawing.numbers) for drawing in printed]))
        return 0
    for drawing in printed:
        for form in texts:
            if len(printed) > 1 and form in ("csv", "markdown"):
                print(f"# {drawing.name}: {drawing.title}" if form == "csv" else f"**{drawing.title}**\n")
            print(plot_print.as_text(drawing.numbers, form, drawing.title))
            print()
    words = console_for(stderr=bool(texts), quiet=quiet)
    for file in files:
        say(words, f"written to {file}")
    if files:
        say(words, f"next: {shlex.join(_next(request))}")
    return 0


def _next(request: Request) -> list[str]:
    """The report of the same runs; of a trace, with the runs beside it, or its numbers where there are no runs."""
    if not is_trace(request.folder):
        return ["evictbench", "report", str(request.folder), *request.filters.options()]
    if RUNS.is_dir():
        return ["evictbench", "report", str(RUNS), "--trace", str(request.folder)]
    return ["evictbench", "plot", str(request.folder), "--format", "table"]


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr)


def _write(drawing: Drawing, forms: Sequence[str], out: Path) -> list[Path]:
    import matplotlib as mpl

    from evictbench.plot_axes import SETTINGS

    files = [out / f"{drawing.name}.{form}" for form in forms]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(SETTINGS):
            figure = drawing.figure()
            for form, file in zip(forms, files, strict=True):
                metadata = {"Date": None} if form == "svg" else {}
                figure.savefig(file, dpi=200, bbox_inches="tight", pad_inches=0.08, metadata=metadata)
    except OSError as error:
        raise UserError(f"Plots cannot be written to {out}: {error.strerror or error}.") from error
    return files


def _check_out(out: Path) -> None:
    import os

    parent = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not parent.is_dir():
        raise UserError(f"{parent} is a file; plots need a folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"Plots cannot be written to {out}: no permission in {parent}.")


def _formats(text: str) -> list[str]:
    forms = listed(text)
    for form in forms:
        if form not in (*PICTURES, *plot_print.TEXTS):
            raise unknown("format", form, (*PICTURES, *plot_print.TEXTS))
    if not forms:
        raise UserError(f"--format names nothing: {', '.join((*PICTURES, *plot_print.TEXTS))}.")
    return forms


def _figures(request: Request) -> list[str] | None:
    """The figures asked for, checked; None: all that there is data for."""
    if not request.folder.is_dir():
        raise UserError(f"There is no folder {request.folder}.")
    known, others = (OF_TRACES, OF_RUNS) if is_trace(request.folder) else (OF_RUNS, OF_TRACES)
    if request.figures is None:
        return None
    names = listed(request.figures)
    for name in names:
        if name in others:
            kind = "runs" if name in OF_RUNS else "a trace"
            raise UserError(f"The figure {name} is of {kind}, and {request.folder} is not: name another folder.")
        if name not in known:
            raise unknown("figure", name, known)
    return names
