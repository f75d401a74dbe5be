"""A frame of numbers as text: a table, CSV, LaTeX or Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

TEXTS = ("table", "csv", "latex", "markdown")


def as_text(frame: pd.DataFrame, form: str, title: str) -> str:
    """The frame in one of `TEXTS`. CSV has every digit; the others have four that matter."""
    frame = _without_empty(frame)
    if form == "csv":
        return str(frame.to_csv(index=False)).rstrip("\n")
    rows = [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    names = [str(name) for name in frame]
    numbers = [frame[name].dtype.kind in "fiu" for name in frame]
    if form == "latex":
        return _latex(names, rows, numbers, title)
    if form == "markdown":
        return _markdown(names, rows, numbers)
    return _table(names, rows, numbers, title)


def as_json(figures: Sequence[tuple[str, str, pd.DataFrame]]) -> str:
    """Figures of a name, a title, a frame: a list with the rows of each, to 15 decimals, or null."""
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


def _without_empty(frame: pd.DataFrame) -> pd.DataFrame:
    """Without a column of panels where there is one panel alone, and without columns of nothing."""
    empty = [name for name in frame if frame[name].isna().all() or (name == "panel" and (frame[name] == "").all())]
    return frame.drop(columns=empty)


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


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
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(names), line(["---:" if number else "---" for number in numbers]), *map(line, rows)])


SPECIAL = {"\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{"}
SPECIAL |= {"}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "‖": r"$\Vert$", "÷": r"$\div$"}
SPECIAL |= {"·": r"$\cdot$"}


def _latex(names: list[str], rows: list[list[str]], numbers: list[bool], title: str) -> str:
    """A tabular in the manner of booktabs."""

    def plain(text: str) -> str:
        return "".join(SPECIAL.get(letter, letter) for letter in text)

    def line(cells: list[str]) -> str:
        return " & ".join(map(plain, cells)) + r" \\"

    columns = "".join("r" if number else "l" for number in numbers)
    head = [rf"% {title}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(names), r"\midrule"]
    return "\n".join([*head, *map(line, rows), r"\bottomrule", r"\end{tabular}"])
