"""Drawing the figures of runs from the frames of `evictbench.plot.data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evictbench.plot.labels import End, label_ends
from evictbench.plot.style import (
    BUDGET,
    PANEL_SIZE,
    budget_ticks,
    bytes_axis,
    in_order,
    legend,
    line_options,
    new_figure,
    percent_axis,
    plot_styles,
    value_axis,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from evictbench.policy.plot_style import PlotStyle

NEUTRAL = {"kl": 0.0, "ppl_ratio": 1.0, "agreement": 1.0, "ppl_increase": 0.0, "length_ratio": 1.0}
"""The value of each metric that the full cache has by definition."""

SINGLE_SIZE = 6.2, 4.2
"""Inches of a figure of one panel, with the names beside the lines."""

APART, MOST_APART = 2.4, 22.0
"""Points by which neighbours at one budget are drawn apart, and by which the first and the last are at most."""


MODES = (
    ("repetition", "in a loop", "#5c2465", "xxx"),
    ("over_long", "over-long (cut off)", "#ec8207", "///"),
    ("wrong", "wrong", "#c9c9c9", ""),
)
"""Column, words in the legend, colour and hatching of each way to lose score."""


def against_budget(frame: pd.DataFrame, metric: str, title: str) -> Figure:
    """Value against budget: a line per policy with its intervals, the full cache as a band, yardsticks dashed."""
    figure, panels, drawn = _panels(frame)
    for axes, points in panels:
        own_metric = str(points["metric"].iloc[0]) if "metric" in points else metric
        _lines(axes, points, "entries", drawn)
        for policy in in_order(points.loc[points["entries"].isna(), "policy"]):
            _band(axes, points[points["policy"] == policy].iloc[0], drawn[policy])
        level = NEUTRAL.get(own_metric) if points["entries"].notna().all() else None
        if own_metric == "ppl":  # each comparison has measured the full cache's too
            level = float(points.sort_values("tokens")["full"].iloc[-1])
        if level is not None:
            axes.axhline(level, color="black", linewidth=1, label="_full")
        axes.set_xscale("log", base=2)
        budget_ticks(axes, points)
        axes.set_xlabel(BUDGET)
        value_axis(axes, own_metric, points, level)
    _finish(figure, panels, frame, drawn, title, "entries")
    return figure


def against_bytes(frame: pd.DataFrame, metric: str, title: str) -> Figure:
    """Value against the bytes that the cache holds, the full cache where its own bytes are."""
    figure, panels, drawn = _panels(frame)
    for axes, points in panels:
        _lines(axes, points, "cache_bytes", drawn)
        axes.set_xscale("log", base=2)
        low, high = points["cache_bytes"].min(), points["cache_bytes"].max()
        margin = max(1.25, (3 * low / high) ** 0.5)  # a narrower axis has no room for round numbers
        axes.set_xlim(low / margin, high * margin)
        axes.set_xlabel("cache held per sample (logarithmic)")
        bytes_axis(axes.xaxis)
        value_axis(axes, metric, points)
    _finish(figure, panels, frame, drawn, title, "cache_bytes")
    return figure


def error_bars(frame: pd.DataFrame, title: str) -> Figure:
    """Bars of lost score, stacked by how the answers ended; one bar per policy and budget."""
    panels = list(dict.fromkeys(frame["panel"]))
    most = max(len(frame[frame["panel"] == panel]) for panel in panels)
    figure, all_axes = new_figure(len(panels), (5.6, max(2.2, 0.27 * most + 0.9)))
    for axes, panel in zip(all_axes, panels, strict=True):
        here = frame[frame["panel"] == panel]
        rows: list[dict[str, Any]] = here.astype(object).where(here.notna(), None).to_dict("records")
        left = [0.0] * len(rows)
        for column, cause, colour, hatch in MODES:
            widths = [row[column] for row in rows]
            axes.barh(
                range(len(rows)),
                widths,
                left=left,
                height=0.72,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.5,
                label=cause,
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [" ".join(filter(None, (row["policy"], row["budget"]))) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        percent_axis(axes.xaxis)
        axes.set_xlabel("score lost (%)")
        axes.set_title("" if len(panels) == 1 else panel)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=10)
    return figure


def aside_of(x: str, place: int, count: int) -> float:
    """Points by which a line is drawn to the right of its data, since policies share budgets.

    x: column of the horizontal axis; bytes are measured and stay where they are. place: of the line among `count`.
    """
    return 0.0 if x != "entries" else (place - (count - 1) / 2) * min(APART, MOST_APART / max(1, count - 1))


def end_labels(figure: Figure, axes: Axes, ends: Sequence[End]) -> None:
    """Fix the layout with room on the right for the longest name, then write the names."""
    longest = max(len(end.name) for end in ends)
    room = (0.45 + 0.078 * longest) / figure.get_figwidth()
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0, 0, 1 - room, 1))
    figure.canvas.draw()
    figure.set_layout_engine("none")
    label_ends(axes, ends)


def _panels(frame: pd.DataFrame) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]], dict[str, PlotStyle]]:
    """A figure, the axes and points of each panel, and the style of each policy."""
    names = list(dict.fromkeys(frame["panel"]))
    figure, all_axes = new_figure(len(names), PANEL_SIZE if len(names) > 1 else SINGLE_SIZE)
    panels = []
    for axes, name in zip(all_axes, names, strict=True):
        axes.set_title("" if len(names) == 1 else name)
        panels.append((axes, frame[frame["panel"] == name]))
    return figure, panels, plot_styles(frame["policy"])


def _lines(axes: Axes, here: pd.DataFrame, x: str, drawn: dict[str, PlotStyle]) -> None:
    """A line with intervals per policy; those at one place are set apart sideways, by points and not in data."""
    from matplotlib.transforms import ScaledTranslation

    policies = in_order(here.loc[here[x].notna(), "policy"])
    for place, policy in enumerate(policies):
        line = here[(here["policy"] == policy) & here[x].notna()].sort_values(["entries", x])
        style = drawn[policy]
        aside = aside_of(x, place, len(policies))
        moved = axes.transData + ScaledTranslation(aside / 72, 0, axes.figure.dpi_scale_trans)
        bounded = line[line["low"].notna()]
        axes.vlines(
            bounded[x],
            bounded["low"],
            bounded["high"],
            transform=moved,
            color=style.colour,
            linewidth=1,
            alpha=0.55,
            label="_interval",
        )
        axes.plot(
            line[x],
            line["value"],
            transform=moved,
            linewidth=1.6 if not style.yardstick else 1.2,
            markersize=5.5,
            label=policy,
            **line_options(style),
        )


def _band(axes: Axes, row: Any, style: PlotStyle) -> None:
    """A policy without a budget: a level line, and its interval as a band."""
    if row["low"] == row["low"] and row["low"] is not None:
        axes.axhspan(row["low"], row["high"], color=style.colour, alpha=0.1, linewidth=0, label="_band")
    axes.axhline(row["value"], color=style.colour, linewidth=1.2, label=row["policy"])


def _finish(
    figure: Figure,
    panels: Sequence[tuple[Axes, pd.DataFrame]],
    frame: pd.DataFrame,
    drawn: dict[str, PlotStyle],
    title: str,
    x: str,
) -> None:
    """Names beside the lines of a single panel, or a legend outside of several; the title above."""
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=10)
    if len(panels) > 1:
        legend(figure, [axes for axes, _ in panels], drawn)
        return
    ((axes, _),) = panels
    ends = []
    beside = in_order(frame.loc[frame[x].notna(), "policy"])
    for policy in in_order(frame["policy"]):
        line = frame[(frame["policy"] == policy)].sort_values(x)
        last = line[line[x].notna()].iloc[-1:] if line[x].notna().any() else line.iloc[-1:]
        place = None if last[x].isna().all() else float(last[x].iloc[0])
        aside = 0.0 if place is None else aside_of(x, beside.index(policy), len(beside))
        ends.append(End(policy, place, float(last["value"].iloc[0]), drawn[policy], aside))
    end_labels(figure, axes, ends)
