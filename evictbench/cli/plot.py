"""`evictbench plot`: write the pictures, or print their numbers; say where they are and what to type next."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError, unknown
from evictbench.plot.drawings import drawings
from evictbench.plot.request import OF_RUNS, OF_TRACES, PICTURES, Drawing, PlotRequest
from evictbench.store.files import check_writable, writing
from evictbench.store.select import comma_list
from evictbench.store.trace_files import is_trace
from evictbench.terminal.console import console_for, say
from evictbench.terminal.markdown import markdown_text
from evictbench.terminal.waiting import Waiting

if TYPE_CHECKING:
    import pandas as pd


RUNS = Path("results/runs")
"""The folder of runs unless another is named."""

TEXTS = ("table", "csv", "latex", "markdown")
"""Formats of numbers that are printed."""

LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "_": r"\_",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",
    "*": "{*}",
    "‖": r"$\Vert$",
    "÷": r"$\div$",
    "·": r"$\cdot$",
}
"""Letters that LaTeX writes otherwise. After the end of a row, a bracket or a star would be taken for its option."""

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""What a text begins with that a spreadsheet takes for a formula."""


def plot_and_show(request: PlotRequest, as_json: bool = False, quiet: bool = False) -> int:
    """Write the pictures or print the numbers, and return the exit code.

    as_json: print the numbers as JSON, and draw nothing. quiet: do not say where the pictures are.
    """
    forms = _formats(request.format)
    names = _figures(request)
    texts = [form for form in forms if form in TEXTS]
    pictures = [] if as_json else [form for form in forms if form in PICTURES]
    if pictures:
        check_writable(request.out, "Plots", "plots need")
    files: list[Path] = []
    with Waiting(console_for(stderr=True, quiet=quiet)) as waiting:
        waiting.begin(f"reading {request.folder}")
        figures = list(drawings(request, names, _warn))
        for number, drawing in enumerate(figures if pictures else (), start=1):
            waiting.begin(f"drawing {drawing.name}, {number} of {len(figures)}")
            files += _write(drawing, pictures, request.out)
    printed = [
        drawing
        for number, drawing in enumerate(figures)
        if not any(drawing.numbers.equals(earlier.numbers) for earlier in figures[:number])
    ]
    if as_json:
        print(json_of([(drawing.name, drawing.title, drawing.numbers) for drawing in printed]))
        return 0
    for drawing in printed:
        for form in texts:
            title = " ".join(drawing.title.split())
            if form == "markdown":
                print(f"**{markdown_text(title)}**\n")
            elif form == "csv" and len(printed) > 1:
                print(f"# {drawing.name}: {title}")
            print(as_text(drawing.numbers, form, drawing.title))
            print()
    console = console_for(stderr=bool(texts), quiet=quiet)
    for file in files:
        say(console, f"written to {file}")
    if files:
        say(console, f"next: {shlex.join(_next(request))}")
    return 0


def as_text(frame: pd.DataFrame, form: str, title: str) -> str:
    """The frame in one of `TEXTS`. CSV has every digit; the others have four that matter."""
    frame = _without_empty(frame)
    if form == "csv":
        return str(_for_spreadsheets(frame).to_csv(index=False)).rstrip("\n")
    title = " ".join(title.split())
    rows = [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    names = [str(name) for name in frame]
    numbers = [frame[name].dtype.kind in "fiu" for name in frame]
    if form == "latex":
        return _latex(names, rows, numbers, title)
    if form == "markdown":
        return _markdown(names, rows, numbers)
    return _table(names, rows, numbers, title)


def json_of(figures: Sequence[tuple[str, str, pd.DataFrame]]) -> str:
    """A JSON list of figures, each with its name, its title and the rows of its frame, to 15 decimals or null."""
    return json.dumps(
        [
            {
                "name": name,
                "title": title,
                "rows": json.loads(_without_empty(frame).to_json(orient="records", double_precision=15)),
            }
            for name, title, frame in figures
        ],
        indent=2,
        ensure_ascii=False,
    )


def _for_spreadsheets(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with an apostrophe before each text that a spreadsheet would run as a formula. Numbers stay as they
    are."""

    def harmless(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value

    texts = {name: frame[name].astype(object).map(harmless) for name in frame if frame[name].dtype.kind not in "biuf"}
    return frame.assign(**texts).rename(columns=harmless)


def _next(request: PlotRequest) -> list[str]:
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

    from evictbench.plot.style import SETTINGS

    files = [out / f"{drawing.name}.{form}" for form in forms]
    with mpl.rc_context(SETTINGS):
        figure = drawing.figure()
        for form, file in zip(forms, files, strict=True):
            metadata = {"Date": None} if form == "svg" else {}
            with writing(file) as unfinished:
                figure.savefig(
                    unfinished, format=form, dpi=200, bbox_inches="tight", pad_inches=0.08, metadata=metadata
                )
    return files


def _formats(text: str) -> list[str]:
    forms = comma_list(text)
    for form in forms:
        if form not in (*PICTURES, *TEXTS):
            raise unknown("format", form, (*PICTURES, *TEXTS))
    if not forms:
        raise UserError(f"--format names nothing: {', '.join((*PICTURES, *TEXTS))}.")
    return forms


def _figures(request: PlotRequest) -> list[str] | None:
    """The figures asked for, checked; None: all that there is data for."""
    if not request.folder.is_dir():
        raise UserError(f"There is no folder {request.folder}.")
    known, others = (OF_TRACES, OF_RUNS) if is_trace(request.folder) else (OF_RUNS, OF_TRACES)
    if request.figures is None:
        return None
    names = comma_list(request.figures)
    for name in names:
        if name in others:
            kind = "runs" if name in OF_RUNS else "a trace"
            raise UserError(f"The figure {name} is of {kind}, and {request.folder} is not: name another folder.")
        if name not in known:
            raise unknown("figure", name, known)
    return names


def _without_empty(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame without empty columns, and without the column of panels if there is only one."""
    empty = [name for name in frame if frame[name].isna().all() or (name == "panel" and (frame[name] == "").all())]
    return frame.drop(columns=empty)


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    return " ".join(str(value).split())


def _table(names: list[str], rows: list[list[str]], numbers: list[bool], title: str) -> str:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), title=escape(title), title_justify="left")
    for name, number in zip(names, numbers, strict=True):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(width=max(40, Console(width=10_000).measure(table).maximum))
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()


def _markdown(names: list[str], rows: list[list[str]], numbers: list[bool]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(map(markdown_text, cells)) + " |"

    return "\n".join([line(names), line(["---:" if number else "---" for number in numbers]), *map(line, rows)])


def _latex(names: list[str], rows: list[list[str]], numbers: list[bool], title: str) -> str:
    """A tabular in the manner of booktabs."""

    def plain(text: str) -> str:
        return "".join(LATEX_SPECIAL.get(letter, letter) for letter in text)

    def line(cells: list[str]) -> str:
        return " & ".join(map(plain, cells)) + r" \\"

    columns = "".join("r" if number else "l" for number in numbers)
    head = [rf"% {title}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(names), r"\midrule"]
    return "\n".join([*head, *map(line, rows), r"\bottomrule", r"\end{tabular}"])
