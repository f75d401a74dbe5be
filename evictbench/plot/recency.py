"""The figure of how much of what is kept a recency window would keep too, in runs that measured it (--recency)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.plot.data import Panels, budget_points
from evictbench.plot.style import (
    BUDGET,
    budget_ticks,
    in_order,
    legend,
    line_options,
    new_figure,
    percent_axis,
    plot_styles,
)
from evictbench.store.select import text_of, texts_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from evictbench.policy.plot_style import PlotStyle

SHARE, WINDOW, LAYERS = "recency_share", "recency_window", "recency_by_layer"
"""Columns of samples: the share, the window that it is of, and the shares of each layer."""


def recency_points(panels: Panels) -> pd.DataFrame:
    """Two views. `against budget`: one row per panel, policy and budget, the share of kept entries that lie inside the
    window, mean over the moments of each answer, layers and KV heads, with its 95% interval over documents. `budget
    ...`: one panel for each budget, with a row for each `layer`.

    The columns are those of `budget_points`, `layer` and `window`. Policies without a budget are left out where the
    window is as long as what is kept. Raises UserError where runs were measured with two windows.
    """
    import pandas as pd

    frames = []
    for name, samples in panels.items():
        measured = samples[samples[SHARE].notna()]
        if (measured[WINDOW] == "same").all():  # which is all that there is, for a cache that keeps everything
            measured = measured[measured["budget"].notna()]
        windows = sorted(measured[WINDOW].astype(str).unique())
        if len(windows) > 1:
            raise UserError(
                f"The share of kept entries inside a recency window was measured with two windows, "
                f"{' and '.join(windows)}: choose runs of one."
            )
        points = budget_points({name: measured}, SHARE)
        panel = ", ".join(filter(None, (name, "against budget")))
        frames.append(points.assign(panel=panel, layer=float("nan"), window=windows[0]))
        for point in points[points["budget"].notna()].to_dict("records"):
            policy, budget = point["policy"], text_of(point["budget"])
            mine = measured["policy"].astype(str).eq(policy) & texts_of(measured["budget"]).eq(budget)
            shares = pd.DataFrame(measured.loc[mine, LAYERS].tolist()).mean()
            panel = ", ".join(filter(None, (name, f"budget {budget}")))
            rows = pd.DataFrame({"layer": shares.index.astype(float), "value": shares.to_numpy()})
            rest = {key: value for key, value in point.items() if key not in ("value", "low", "high", "panel")}
            frames.append(rows.assign(**rest, panel=panel, window=windows[0]))
    frame = pd.concat(frames, ignore_index=True)
    places = {panel: place for place, panel in enumerate(_panel_order(frame))}
    return frame.sort_values("panel", key=lambda panels: panels.map(places), kind="stable", ignore_index=True)


def recency_shares(frame: pd.DataFrame, title: str) -> Figure:
    """Share against budget, and against layer at each budget. A policy without a budget is a level line."""
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(frame["panel"]))
    figure, all_axes = new_figure(len(names))
    drawn = plot_styles(frame["policy"])
    window = str(frame["window"].iloc[0])
    size = "a window of the same size" if window == "same" else f"the last {window} tokens"
    for axes, name in zip(all_axes, names, strict=True):
        here = frame[frame["panel"] == name]
        by_layer = here["layer"].notna().any()
        for policy in in_order(here["policy"]):
            line = here[here["policy"] == policy].sort_values("layer" if by_layer else "entries")
            _line(axes, line, "layer" if by_layer else "entries", policy, drawn[policy])
        axes.set_title(name)
        axes.set_ylim(0, 1.04)
        percent_axis(axes.yaxis)
        if by_layer:
            axes.set_xlabel("layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            axes.set_xscale("log", base=2)
            budget_ticks(axes, here)
            axes.set_xlabel(BUDGET)
    for axes in all_axes[:: 2 if len(names) == 4 else 3]:
        axes.set_ylabel("kept entries inside the window (%)")
    legend(figure, all_axes, drawn)
    title = f"{title}\nshare of the kept entries that lie inside {size}"
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=10)
    return figure


def _line(axes: Axes, line: pd.DataFrame, x: str, policy: str, style: PlotStyle) -> None:
    """A policy's line with its intervals, or a level line for one without a budget."""
    if line[x].isna().all():
        axes.axhline(float(line["value"].iloc[0]), color=style.colour, linewidth=1.2, label=policy)
        return
    bounded = line[line["low"].notna()]
    axes.vlines(bounded[x], bounded["low"], bounded["high"], color=style.colour, linewidth=1, alpha=0.55)
    every = max(1, len(line) // 6) if len(line) > 8 else 1
    axes.plot(line[x], line["value"], label=policy, linewidth=1.5, markersize=5, markevery=every, **line_options(style))


def _panel_order(frame: pd.DataFrame) -> list[str]:
    """Panels against budget first, then those of budgets by size, shares of the text behind numbers."""

    def rank(row: tuple[str, float, object]) -> tuple[bool, bool, float]:
        _, layer, budget = row
        text = budget if isinstance(budget, str) else "0"
        return layer == layer, text.endswith("%"), float(text.rstrip("%"))

    rows = sorted(zip(frame["panel"], frame["layer"], frame["budget"], strict=True), key=rank)
    return list(dict.fromkeys(panel for panel, _, _ in rows))
