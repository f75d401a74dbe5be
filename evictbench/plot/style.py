"""What every figure shares: sizes and type, axes with units, and the legend."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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

    from evictbench.terminal.units import human_bytes

    axis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    axis.set_minor_formatter(NullFormatter())
    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        span = high / low
        steps = {5: (1, 1.5, 2, 3, 5, 7), 50: (1, 2, 5), 1000: (1, 3)}
        axis.set_major_locator(LogLocator(10, next((found for most, found in steps.items() if span < most), (1,))))


def percent_axis(axis: Any) -> None:
    """Ticks of a share in percent."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))


def budget_ticks(axes: Axes, here: pd.DataFrame) -> None:
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


Line = str | tuple[int, tuple[float, ...]]


@dataclass(frozen=True)
class Style:
    """How a policy is drawn. line: solid, or (offset, dashes in line widths); hollow: a marker of white inside."""

    colour: str
    marker: str
    line: Line = "-"
    hollow: bool = False
    yardstick: bool = False

    def kwargs(self) -> dict[str, Any]:
        """For matplotlib's plot and errorbar."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.line,
            "markerfacecolor": "white" if self.hollow else self.colour,
            "markeredgecolor": self.colour,
        }


DASHED: Line = (0, (4, 2))
DOTTED: Line = (0, (1, 1.5))
DASH_DOT: Line = (0, (6, 1.5, 1, 1.5))
LONG: Line = (0, (9, 1.5))
DASH_DOT_DOT: Line = (0, (6, 1.5, 1, 1.5, 1, 1.5))

KNOWN = {
    "full": Style("#000000", "d", hollow=True, yardstick=True),
    "oracle": Style("#000000", "*", DASHED, yardstick=True),
    "random": Style("#737373", "x", (0, (2, 2)), yardstick=True),
    "streaming_llm": Style("#5e9cc4", "s"),
    "tova": Style("#ba9864", "^"),
    "h2o": Style("#ec8207", "o"),
    "snapkv": Style("#2c27fb", "D"),
    "dms": Style("#b62703", "v", DASH_DOT),
    "kvpop": Style("#ba3bdf", "P", LONG),
    "kvpop_mlp": Style("#360085", "X", DASH_DOT_DOT),
    "indexmem_pp": Style("#7f2f29", "h", DASH_DOT),
    "distillcache": Style("#5c2465", "p", LONG),
}
"""Policies with a style of their own, in the order in which legends name them."""

OTHER_COLOURS = ("#117733", "#008080", "#7a7a00", "#d4457b", "#4f6228")
OTHER_MARKERS = ("<", ">", "8", "H", "1", "2", "3")
VARIANT_LINES: tuple[Line, ...] = (DOTTED, DASHED, DASH_DOT, LONG, DASH_DOT_DOT)


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each label, a policy with its settings (h2o:group=max) or what follows a space (h2o 512).

    A policy that is not in the table gets the style that the hash of its name says, or the next free one. Several
    labels of one policy share its colour; all but the first by name have hollow markers and other lines.
    """
    found: dict[str, Style] = {}
    taken: set[tuple[str, str]] = set()
    of_base: dict[str, Style] = {}
    variants: dict[str, int] = {}
    for label in sorted(set(labels), key=lambda label: (len(label), label)):
        base = re.split(r"[: ]", label, maxsplit=1)[0]
        if base not in of_base:
            of_base[base] = KNOWN.get(base) or _by_hash(base, taken)
        earlier = variants.get(base, 0)
        variants[base] = earlier + 1
        style = of_base[base]
        if earlier:
            style = replace(style, line=VARIANT_LINES[(earlier - 1) % len(VARIANT_LINES)], hollow=True)
        found[label] = style
    return found


def order(labels: Iterable[str]) -> list[str]:
    """Labels in the order of the table, then by name."""
    names = list(KNOWN)

    def place(label: str) -> tuple[int, str]:
        base = re.split(r"[: ]", label, maxsplit=1)[0]
        return (names.index(base) if base in names else len(names)), label

    return sorted(set(labels), key=place)


def _by_hash(name: str, taken: set[tuple[str, str]]) -> Style:
    pairs = [(colour, marker) for marker in OTHER_MARKERS for colour in OTHER_COLOURS]
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % len(pairs)
    free = [pair for pair in pairs[start:] + pairs[:start] if pair not in taken] or [pairs[start]]
    taken.add(free[0])
    return Style(*free[0], line=DASH_DOT)
