"""Drawing the figures of runs from the frames of `plot_data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evictbench.plot_labels import End, label_ends
from evictbench.plot_palette import Style, order, styles

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "score": "score (%)",
    "kl": "KL (nats per token)",
    "kl_q1": "KL, first quarter (nats per token)",
    "kl_q2": "KL, second quarter (nats per token)",
    "kl_q3": "KL, third quarter (nats per token)",
    "kl_q4": "KL, last quarter (nats per token)",
    "agreement": "same first token as the full cache (%)",
    "ppl_ratio": "perplexity ÷ that of the full cache (ratio)",
    "nll": "negative log-likelihood (nats per token)",
    "nll_full": "negative log-likelihood, full cache (nats per token)",
    "cache_bytes": "cache held per sample",
    "prefill_peak_bytes": "cache held at the prefill's peak, per sample",
    "occupancy_max": "entries per KV head seen by a query, most",
    "occupancy_mean": "entries per KV head seen by a query, mean",
    "truncated": "answers cut off (%)",
    "repetition": "answers in a loop (%)",
    "output_tokens": "tokens per answer",
    "prompt_tokens": "tokens per prompt",
}
"""What an axis says of a metric, with its unit."""

SHARES = ("score", "agreement", "truncated", "repetition")
"""Metrics in [0, 1] that an axis shows in percent."""

NEUTRAL = {"kl": 0.0, "ppl_ratio": 1.0, "agreement": 1.0}
"""What the full cache would have, by definition."""

BUDGET = "budget (entries per KV head, logarithmic)"
SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "svg.fonttype": "none",
    "svg.hashsalt": "evictbench",
}
"""matplotlib's settings for every figure."""

PANEL_SIZE = 4.6, 3.5
"""Inches."""

APART = 2.4
"""Points by which policies at one budget are drawn apart."""


def new_figure(panels: int, size: tuple[float, float] = PANEL_SIZE) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, at most three beside each other, without a window; axes in order."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2 if panels == 4 else min(3, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(size[0] * columns + 0.6, size[1] * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in axes[panels:]:
        unused.remove()
    return figure, axes[:panels]


def against_budget(frame: pd.DataFrame, metric: str, title: str) -> Figure:
    """Value against budget: a line per policy with its intervals, the full cache as a band, yardsticks dashed."""
    panels = list(dict.fromkeys(frame["panel"]))
    figure, all_axes = new_figure(len(panels), PANEL_SIZE if len(panels) > 1 else (6.2, 4.2))
    drawn = styles(frame["policy"])
    for axes, panel in zip(all_axes, panels, strict=True):
        here = frame[frame["panel"] == panel]
        own = str(here["metric"].iloc[0]) if "metric" in here else metric
        _lines(axes, here, "entries", drawn)
        for policy in order(here.loc[here["entries"].isna(), "policy"]):
            _band(axes, here[here["policy"] == policy].iloc[0], drawn[policy])
        if own in NEUTRAL and here["entries"].notna().all():
            axes.axhline(NEUTRAL[own], color="black", linewidth=1, label="_full")
        axes.set_xscale("log", base=2)
        _budget_ticks(axes, here)
        axes.set_xlabel(BUDGET)
        _value_axis(axes, own, here)
        axes.set_title("" if len(panels) == 1 else panel)
    _finish(figure, all_axes, frame, drawn, title, "entries")
    return figure


def against_bytes(frame: pd.DataFrame, metric: str, title: str) -> Figure:
    """Value against the bytes that the cache holds, the full cache where its own bytes are."""
    panels = list(dict.fromkeys(frame["panel"]))
    figure, all_axes = new_figure(len(panels), PANEL_SIZE if len(panels) > 1 else (6.2, 4.2))
    drawn = styles(frame["policy"])
    for axes, panel in zip(all_axes, panels, strict=True):
        here = frame[frame["panel"] == panel]
        _lines(axes, here, "cache_bytes", drawn)
        axes.set_xscale("log", base=2)
        axes.set_xlim(here["cache_bytes"].min() / 1.25, here["cache_bytes"].max() * 1.25)
        axes.set_xlabel("cache held per sample (logarithmic)")
        bytes_axis(axes.xaxis)
        _value_axis(axes, metric, here)
        axes.set_title("" if len(panels) == 1 else panel)
    _finish(figure, all_axes, frame, drawn, title, "cache_bytes")
    return figure


MODES = (
    ("repetition", "in a loop", "#5c2465", "xxx"),
    ("over_long", "over-long (cut off)", "#ec8207", "///"),
    ("wrong", "wrong", "#c9c9c9", ""),
)
"""Column, words, colour and hatching of each way to lose score."""


def error_bars(frame: pd.DataFrame, title: str) -> Figure:
    """Bars of lost score, stacked by how the answers ended; one bar per policy and budget."""
    panels = list(dict.fromkeys(frame["panel"]))
    most = max(len(frame[frame["panel"] == panel]) for panel in panels)
    figure, all_axes = new_figure(len(panels), (5.6, max(2.2, 0.27 * most + 0.9)))
    for axes, panel in zip(all_axes, panels, strict=True):
        here = frame[frame["panel"] == panel]
        rows: list[dict[str, Any]] = here.astype(object).where(here.notna(), None).to_dict("records")
        left = [0.0] * len(rows)
        for column, words, colour, hatch in MODES:
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
                label=words,
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


def _lines(axes: Axes, here: pd.DataFrame, x: str, drawn: dict[str, Style]) -> None:
    """A line with intervals per policy; those at one place are set apart sideways, by points and not in data."""
    from matplotlib.transforms import ScaledTranslation

    policies = order(here.loc[here[x].notna(), "policy"])
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
            **style.kwargs(),
        )


def aside_of(x: str, place: int, count: int) -> float:
    """Points by which the line at this place of so many is drawn to the right of its data: budgets are shared."""
    return (place - (count - 1) / 2) * APART if x == "entries" else 0.0


def _band(axes: Axes, row: Any, style: Style) -> None:
    """A policy without a budget: a level line, and its interval as a band."""
    if row["low"] == row["low"] and row["low"] is not None:
        axes.axhspan(row["low"], row["high"], color=style.colour, alpha=0.1, linewidth=0, label="_band")
    axes.axhline(row["value"], color=style.colour, linewidth=1.2, label=row["policy"])


def _value_axis(axes: Axes, metric: str, here: pd.DataFrame) -> None:
    axes.set_ylabel(LABELS.get(metric, metric))
    least, most = here[["value", "low"]].min(axis=None), here[["value", "high"]].max(axis=None)
    margin = 0.05 * (most - least) or 0.05 * abs(most) or 1.0
    axes.set_ylim(min(axes.get_ylim()[0], least - margin), max(axes.get_ylim()[1], most + margin))
    if metric in SHARES:
        percent_axis(axes.yaxis)
        axes.set_ylim(max(-0.03, least - margin), min(1.03, most + margin))
    elif metric.endswith("_bytes"):
        bytes_axis(axes.yaxis)
    elif metric.startswith("kl") and (here["value"] > 0).all() and here["value"].max() > 4 * here["value"].min():
        axes.set_yscale("log")
        axes.set_ylim(bottom=here["value"].min() / 2)
        plain_log(axes.yaxis)
        axes.set_ylabel(LABELS.get(metric, metric).removesuffix(")") + ", logarithmic)")


def plain_log(axis: Any, thousands: bool = False) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5, in plain numbers; whole ones with commas, if `thousands`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if thousands else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def bytes_axis(axis: Any) -> None:
    """Ticks in bytes, kB, MB, GB."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from evictbench.table import human_bytes

    axis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    axis.set_minor_formatter(NullFormatter())
    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        span = high / low
        axis.set_major_locator(LogLocator(10, (1, 1.5, 2, 3, 5, 7) if span < 5 else (1, 2, 5) if span < 50 else (1,)))


def percent_axis(axis: Any) -> None:
    """Ticks of a share in percent."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))


def _budget_ticks(axes: Axes, here: pd.DataFrame) -> None:
    """A tick at each budget, shares with the entries they came to; of two that would touch, the smaller one's."""
    from matplotlib.ticker import FixedLocator, NullLocator

    budgeted = here[here["entries"].notna()]
    places = budgeted.groupby("budget")["entries"].median().sort_values()
    if places.empty:
        return
    low, high = budgeted["entries"].min(), budgeted["entries"].max()
    axes.set_xlim(low / 1.25 if high > low else low / 2, high * 1.25 if high > low else high * 2)
    span = axes.get_xlim()[1] / axes.get_xlim()[0]
    kept: list[tuple[float, str]] = []
    for budget, entries in places.items():
        if not kept or entries / kept[-1][0] > span**0.09:
            kept.append((entries, f"{entries:.0f}\n{budget}" if str(budget).endswith("%") else f"{budget}\n "))
    axes.xaxis.set_major_locator(FixedLocator([entries for entries, _ in kept]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([words for _, words in kept])


def _finish(
    figure: Figure, all_axes: Sequence[Axes], frame: pd.DataFrame, drawn: dict[str, Style], title: str, x: str
) -> None:
    """Names beside the lines of a single panel, or a legend outside of several; the title above."""
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=10)
    if len(all_axes) > 1:
        legend(figure, all_axes, drawn)
        return
    (axes,) = all_axes
    ends = []
    beside = order(frame.loc[frame[x].notna(), "policy"])
    for policy in order(frame["policy"]):
        line = frame[(frame["policy"] == policy)].sort_values(x)
        last = line[line[x].notna()].iloc[-1:] if line[x].notna().any() else line.iloc[-1:]
        place = None if last[x].isna().all() else float(last[x].iloc[0])
        aside = 0.0 if place is None else aside_of(x, beside.index(policy), len(beside))
        ends.append(End(policy, place, float(last["value"].iloc[0]), drawn[policy], aside))
    end_labels(figure, axes, ends)


def end_labels(figure: Figure, axes: Axes, ends: Sequence[End]) -> None:
    """Fix the layout with room on the right for the longest name, then write the names."""
    longest = max(len(end.name) for end in ends)
    room = (0.45 + 0.078 * longest) / figure.get_figwidth()
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0, 0, 1 - room, 1))
    figure.canvas.draw()
    figure.set_layout_engine("none")
    label_ends(axes, ends)


def legend(figure: Figure, all_axes: Sequence[Axes], drawn: dict[str, Style]) -> None:
    """One legend to the right of all panels, in the order of the table of policies."""
    found: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    names = [*order(name for name in found if name in drawn), *(name for name in found if name not in drawn)]
    figure.legend(
        [found[name] for name in names], names, loc="outside right upper", frameon=False, fontsize=9, handlelength=3
    )
