"""Figures as SVG that stands inside a page: text stays text, ids are unique in the page, nothing points outside."""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.plot.drawings import drawings
from evictbench.plot.request import OF_RUNS, OF_TRACES, Drawing, PlotRequest
from evictbench.plot.style import SETTINGS
from evictbench.report.warnings import Notice
from evictbench.store.select import texts_of
from evictbench.store.trainings import as_one_row, several

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from evictbench.report.request import ReportRequest

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

DIVIDED_BY = ("context", "question", "protocol", "prefill", "thoughts", "seed")
"""Columns by which a figure is divided into panels where its runs are of several protocols, tried in this order."""

MOST_ROWS = 200
"""Rows of numbers that are shown below a figure; a map of thousands says nothing in a table."""

TITLES = OF_RUNS | OF_TRACES
"""What each figure shows, by its name."""


@dataclass(frozen=True)
class Drawn:
    """A figure in the page: its name, what it shows, its title, the SVG, and the columns and rows of its numbers."""

    name: str
    shows: str
    title: str
    svg: str
    names: Sequence[str]
    rows: Sequence[Sequence[str]]


def figures(request: ReportRequest, samples: pd.DataFrame) -> tuple[list[Drawn], list[Notice]]:
    """All figures of the runs and traces, and a notice about each that could not be drawn."""
    drawn: list[Drawn] = []
    refused: list[Notice] = []
    for (suite, model), group in samples.groupby(["suite", "model"], observed=True):
        one_row = request.trainings and bool(several(as_one_row(group)))
        filters = replace(request.filters, suite=str(suite), model=str(model))
        of_group, error, notes = _of_group(PlotRequest(request.folder, filters=filters, trainings=one_row), group)
        refused += _draw(of_group, drawn)
        # How many documents each run has is warned of beside the leaderboard.
        refused += [Notice("plots", sentence) for sentence in notes if "--paired" not in sentence]
        if error is not None:
            refused.append(Notice("plots", f"No plot of {suite} on {model}. {error}"))
    for trace in request.traces:
        refused += _draw(drawings(PlotRequest(trace), None, lambda sentence: None), drawn)
    return drawn, refused


def inline(figure: Figure, prefix: str, label: str) -> str:
    """The figure as one <svg> element without a background, every id in it beginning with `prefix`."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="svg", bbox_inches="tight", pad_inches=0.08, transparent=True, metadata={"Date": None}
    )
    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # A style element would hold for the whole page, which has the same style for plots alone.
            if child.tag in (f"{{{SVG}}}style", f"{{{SVG}}}metadata"):
                parent.remove(child)
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id":
                element.set(name, prefix + value)
            elif name == f"{{{XLINK}}}href":
                del element.attrib[name]
                element.set("href", f"#{prefix}{value[1:]}" if value.startswith("#") else value)
            elif "url(#" in value:
                element.set(name, value.replace("url(#", f"url(#{prefix}"))
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    # Never so small that the type, of 10 points, cannot be read; a narrow screen scrolls instead.
    width = float(root.attrib["viewBox"].split()[2])
    root.set("style", f"min-width: {width:.0f}px; max-width: {1.7 * width:.0f}px")
    root.set("role", "img")
    root.set("aria-label", label)
    return ElementTree.tostring(root, encoding="unicode")


def _draw(figures: Iterable[Drawing], drawn: list[Drawn]) -> list[Notice]:
    """Draw figures and add them to `drawn`. Returns a notice about each whose names have no room."""
    from kiwisolver import UnsatisfiableConstraint  # what matplotlib lays figures out with

    refused = []
    for drawing in figures:
        try:
            drawn.append(_drawn(drawing, f"f{len(drawn)}"))
        except (UnsatisfiableConstraint, UserWarning):
            text = f"{drawing.name} is not drawn: the names of its policies are too long to stand beside it."
            refused.append(Notice("plots", text))
    return refused


def _of_group(request: PlotRequest, group: pd.DataFrame) -> tuple[list[Drawing], UserError | None, list[str]]:
    """The figures of a suite and model, the error that prevents them, and what readers should know.

    Runs of several protocols go into panels by the first column that makes the figures possible.
    """
    differing = [name for name in DIVIDED_BY if texts_of(group[name]).nunique() > 1]
    refusal: UserError | None = None
    for by in (None, *differing):
        notes: list[str] = []
        try:
            return list(drawings(replace(request, by=by), None, notes.append)), None, notes
        except UserError as error:
            refusal = refusal or error
    return [], refusal, []


def _drawn(drawing: Drawing, mark: str) -> Drawn:
    import matplotlib as mpl

    with mpl.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("error", message="constrained_layout not applied")
        svg = inline(drawing.figure(), f"{mark}-", f"{drawing.name}: {drawing.title}")
    names, rows = _table(drawing.numbers) if len(drawing.numbers) <= MOST_ROWS else ([], [])
    shows = next((title for name, title in TITLES.items() if re.match(rf"{name}\b", drawing.name)), drawing.name)
    return Drawn(drawing.name, shows, drawing.title, svg, names, rows)


def _table(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """The names and rows of a table, without empty columns."""
    used = [name for name in frame if frame[name].notna().any() and not (frame[name] == "").all()]
    return [str(name) for name in used], [
        [_cell(value) for value in row] for row in frame[used].itertuples(index=False)
    ]


def _cell(value: object) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.5g}"
    return str(value)
