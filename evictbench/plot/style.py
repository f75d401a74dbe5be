"""What every figure shares: sizes and type, how each policy is drawn, axes with units, and the legend."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.policy.plot_style import DASH_DOT, DASH_DOT_DOT, DASHED, DOTTED, LONG, Line, PlotStyle
from evictbench.registry import load_policy
from evictbench.terminal.units import human_bytes

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
    "ppl": "perplexity, over all tokens",
    "ppl_increase": "perplexity − that of the full cache",
    "wrong": "wrong answers (%)",
    "cut_off": "answers cut off (%)",
    "length_ratio": "tokens per answer ÷ the full cache's",
    "recency_share": "kept entries inside a recency window (%)",
    "cache_bytes": "cache held per sample",
    "prefill_peak_bytes": "cache held at the prefill's peak, per sample",
    "occupancy_max": "entries per KV head seen by a query, most",
    "occupancy_mean": "entries per KV head seen by a query, mean",
    "truncated": "answers cut off (%)",
    "repetition": "answers in a loop (%)",
    "output_tokens": "tokens per answer",
    "prompt_tokens": "tokens per prompt",
}
"""The label of a metric's axis, with its unit."""

PERCENT = ("score", "agreement", "truncated", "repetition", "wrong", "cut_off", "recency_share")
"""Metrics in [0, 1] that an axis shows in percent."""

BUDGET = "budget (entries per KV head, logarithmic)"
"""The label of a budget axis."""

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
"""Width and height of a panel in inches."""

OTHER_COLOURS = ("#117733", "#008080", "#7a7a00", "#d4457b", "#4f6228")
OTHER_MARKERS = ("<", ">", "8", "H", "1", "2", "3")
OTHER_LINES: tuple[Line, ...] = (DASH_DOT, LONG, DASHED, DOTTED, DASH_DOT_DOT)
"""Colours, markers and lines of policies that declare no style; each combination is one style."""

VARIANT_LINES: tuple[Line, ...] = (DOTTED, DASHED, DASH_DOT, LONG, DASH_DOT_DOT)
"""Lines of the second and further labels of one policy in a figure."""


def plot_styles(labels: Iterable[str]) -> dict[str, PlotStyle]:
    """The style of each label in a figure, where a label is a policy with settings (h2o:group=max) or with something
    behind a space (h2o 512).

    An installed policy has the style that its class declares itself, unless another policy of the figure has its colour
    and marker. Any other has the one that the hash of its name says, or the next that is free in the figure. Labels of
    one policy share its colour; all but the first of them, by length and name, have hollow markers and other lines.
    """
    labels = sorted(set(labels), key=lambda label: (len(label), label))
    declared = _declared(labels)
    by_policy: dict[str, PlotStyle] = {}
    for name in sorted(declared, key=lambda name: _place(name, declared[name])):
        style, taken = declared[name], [(other.colour, other.marker, other.line) for other in by_policy.values()]
        if style is None or any(style.colour == colour and style.marker == marker for colour, marker, _ in taken):
            style = _by_hash(name, taken)
        by_policy[name] = style
    drawn: dict[str, PlotStyle] = {}
    earlier: Counter[str] = Counter()
    for label in labels:
        name = _policy_name(label)
        drawn[label] = by_policy[name]
        if number := earlier[name]:
            line = VARIANT_LINES[(number - 1) % len(VARIANT_LINES)]
            drawn[label] = replace(by_policy[name], line=line, hollow=True)
        earlier[name] += 1
    return drawn


def in_order(labels: Iterable[str]) -> list[str]:
    """Labels as legends name them: by the place that a policy's style declares, then by name."""
    labels = set(labels)
    declared = _declared(labels)
    return sorted(labels, key=lambda label: _place(label, declared[_policy_name(label)]))


def line_options(style: PlotStyle) -> dict[str, Any]:
    """A style as options of matplotlib's plot."""
    return {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": style.line,
        "markerfacecolor": "white" if style.hollow else style.colour,
        "markeredgecolor": style.colour,
    }


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


def value_axis(axes: Axes, metric: str, here: pd.DataFrame, level: float | None = None) -> None:
    """The vertical axis of a metric: its words and unit, percent or bytes, limits around values, intervals and a
    level line."""
    axes.set_ylabel(LABELS.get(metric, metric))
    least, most = here[["value", "low"]].min(axis=None), here[["value", "high"]].max(axis=None)
    if level is not None:
        least, most = min(least, level), max(most, level)
    margin = 0.05 * (most - least) or 0.05 * abs(most) or 1.0
    axes.set_ylim(least - margin, most + margin)
    if metric in PERCENT:
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

    axis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    axis.set_minor_formatter(NullFormatter())
    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        span = high / low
        steps = {5: (1, 1.5, 2, 3, 5, 7), 50: (1, 2, 5), 1000: (1, 3)}
        axis.set_major_locator(LogLocator(10, next((subs for most, subs in steps.items() if span < most), (1,))))


def percent_axis(axis: Any) -> None:
    """Ticks of a share in percent."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))


def budget_ticks(axes: Axes, here: pd.DataFrame) -> None:
    """A tick at each budget, shares with the entries they came to; of two that would touch, the smaller one's."""
    from matplotlib.ticker import FixedLocator, NullLocator

    budgeted = here[here["entries"].notna()]
    by_budget = budgeted.groupby("budget")["entries"].median().sort_values()
    if by_budget.empty:
        return
    low, high = budgeted["entries"].min(), budgeted["entries"].max()
    axes.set_xlim(low / 1.25 if high > low else low / 2, high * 1.25 if high > low else high * 2)
    span = axes.get_xlim()[1] / axes.get_xlim()[0]
    kept: list[tuple[float, str]] = []
    for budget, entries in by_budget.items():
        if not kept or entries / kept[-1][0] > span**0.09:
            kept.append((entries, f"{entries:.0f}\n{budget}" if str(budget).endswith("%") else f"{budget}\n "))
    axes.xaxis.set_major_locator(FixedLocator([entries for entries, _ in kept]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([label for _, label in kept])


def legend(figure: Figure, all_axes: Sequence[Axes], drawn: Collection[str]) -> None:
    """One legend to the right of all panels: the policies of `drawn` in order, then what else has a name."""
    handles: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    names = [*in_order(name for name in handles if name in drawn), *(name for name in handles if name not in drawn)]
    figure.legend(
        [handles[name] for name in names], names, loc="outside right upper", frameon=False, fontsize=9, handlelength=3
    )


def _policy_name(label: str) -> str:
    return re.split(r"[: ]", label, maxsplit=1)[0]


def _declared(labels: Iterable[str]) -> dict[str, PlotStyle | None]:
    """The style that each policy's class declares itself; None for one that does not, or that is not installed."""
    declared: dict[str, PlotStyle | None] = {}
    for name in dict.fromkeys(map(_policy_name, labels)):
        try:
            declared[name] = vars(load_policy(name)).get("plot_style")
        except UserError:
            declared[name] = None
    return declared


def _place(name: str, style: PlotStyle | None) -> tuple[float, str]:
    return (math.inf if style is None else style.place), name


def _by_hash(name: str, taken: Collection[tuple[str, str, Line]]) -> PlotStyle:
    """The first style, from the one that the hash of a name says, that no policy has."""
    pairs = [(colour, marker) for marker in OTHER_MARKERS for colour in OTHER_COLOURS]
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % len(pairs)
    candidates = [(*pair, line) for line in OTHER_LINES for pair in pairs[start:] + pairs[:start]]
    return PlotStyle(*next((candidate for candidate in candidates if candidate not in taken), candidates[0]))
