"""Drawing the figures of traces from the frames of `evictbench.plot.trace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evictbench.plot.style import (
    PANEL_SIZE,
    bytes_axis,
    in_order,
    legend,
    line_options,
    new_figure,
    percent_axis,
    plain_log,
    plot_styles,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from evictbench.policy.plot_style import PlotStyle

MAP_SIZE = 3.9, 3.1
"""Inches of one retention map."""

WIDE_TITLE = 30
"""Characters of a policy's name that leave no room for a budget on the same line above a map."""


def latency(frame: pd.DataFrame, title: str) -> Figure:
    """Milliseconds a step against position, and seconds of prefill against the prompt's length."""
    figure, panels, drawn = _panels(frame, title)
    for name, axes in panels.items():
        here = frame[frame["panel"] == name]
        if name == "prefill" and here["position"].nunique() == 1:
            _bars(axes, here, drawn)
            continue
        _lines(axes, here, drawn)
        prompt = name == "prefill"
        axes.set_xlabel("prompt (tokens)" if prompt else "position (tokens seen)")
        axes.set_ylabel("reading one prompt (s)" if prompt else "a decode step (ms), median and quartiles")
        axes.set_ylim(bottom=0)
        _lost(axes, here, drawn)
    legend(figure, list(panels.values()), drawn)
    return figure


def memory(frame: pd.DataFrame, title: str) -> Figure:
    """Bytes of the cache, and bytes allocated, against position."""
    figure, panels, drawn = _panels(frame, title)
    for name, axes in panels.items():
        here = frame[frame["panel"] == name]
        _lines(axes, here, drawn)
        axes.set_xlabel("position (tokens seen)")
        axes.set_ylabel(f"{name.partition(',')[0]} (bytes)")
        bytes_axis(axes.yaxis)
        axes.set_ylim(0, 1.08 * max(1.0, here["value"].max()))
        _lost(axes, here, drawn)
    legend(figure, list(panels.values()), drawn)
    return figure


def kept(frame: pd.DataFrame, title: str) -> Figure:
    """The share of kept tokens by position, and the share inside a recency window of the same size."""
    figure, panels, drawn = _panels(frame, title)
    for name, axes in panels.items():
        _lines(axes, frame[frame["panel"] == name], drawn)
        lie = name == "where kept tokens lie"
        axes.set_xscale("linear")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("position (tokens)" if lie else "tokens seen")
        axes.set_ylabel("share of kept tokens (%)" if lie else "share inside a window of the same size (%)")
        percent_axis(axes.yaxis)
        axes.set_ylim(0, None if lie else 1.04)
    legend(figure, list(panels.values()), drawn)
    return figure


def retention(frame: pd.DataFrame, title: str) -> Figure:
    """A column per policy: above, position against time over all heads; below, each layer and head at the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [
        (policy, group)
        for policy in in_order(frame["policy"])
        for _, group in frame[frame["policy"] == policy].groupby("budget", dropna=False, sort=False)
    ]
    figure = Figure(figsize=(MAP_SIZE[0] * len(cells) + 0.9, MAP_SIZE[1] * 2 + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(2, len(cells), squeeze=False)
    for column, (policy, group) in enumerate(cells):
        budget = group["budget"].iloc[0]
        above, below = all_axes[0][column], all_axes[1][column]
        image = _over_time(above, group[group["view"] == "over time"])
        _by_head(below, group[group["view"] == "by layer and head"])
        between = " " if len(policy) < WIDE_TITLE else "\n"
        above.set_title(f"{policy}{between}{budget}" if budget == budget and budget is not None else policy)
        for axes in (above, below):
            axes.grid(visible=False)
    bar = figure.colorbar(image, ax=all_axes, shrink=0.6, label="share of heads that hold the position (%)")
    percent_axis(bar.ax.yaxis)
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=10)
    return figure


def _over_time(axes: Axes, view: pd.DataFrame) -> Any:
    grid = view.pivot(index="position", columns="seen", values="kept")
    axes.set_xlabel("time (tokens seen)")
    axes.set_ylabel("position (tokens)")
    return axes.pcolormesh(
        _edges(list(grid.columns)), [*grid.index, grid.index[-1] + view["width"].iloc[0]], grid.to_numpy(), **_colours()
    )


def _by_head(axes: Axes, view: pd.DataFrame) -> None:
    from matplotlib.ticker import MaxNLocator

    grid = view.pivot(index=["layer", "head"], columns="position", values="kept")
    heads = len(grid.index.unique("head"))
    axes.pcolormesh(
        [*grid.columns, grid.columns[-1] + view["width"].iloc[0]],
        [row / heads for row in range(len(grid) + 1)],
        grid.to_numpy(),
        **_colours(),
    )
    axes.set_xlabel("position (tokens), at the end")
    axes.set_ylabel(f"layer ({heads} KV heads each)" if heads > 1 else "layer")
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _colours() -> dict[str, Any]:
    """Grey says as much in print, and to every eye; the square root makes a few tokens of a stretch visible."""
    from matplotlib.colors import PowerNorm

    return {"cmap": "Greys", "norm": PowerNorm(0.5, 0.0, 1.0), "rasterized": True}


def _edges(positions: list[float]) -> list[float]:
    """Borders of columns whose right end is the style itself."""
    first = positions[0] - (positions[1] - positions[0] if len(positions) > 1 else positions[0])
    return [max(0.0, first), *positions]


def _panels(frame: pd.DataFrame, title: str) -> tuple[Figure, dict[str, Axes], dict[str, PlotStyle]]:
    names = list(dict.fromkeys(frame["panel"]))
    figure, all_axes = new_figure(len(names), PANEL_SIZE)
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=10)
    for name, axes in zip(names, all_axes, strict=True):
        axes.set_title(name)
    return figure, dict(zip(names, all_axes, strict=True)), plot_styles(frame["line"])


def _lines(axes: Axes, here: pd.DataFrame, drawn: dict[str, PlotStyle]) -> None:
    """A line per policy at its positions; quartiles as a thin band. Logarithmic where positions span a lot."""
    measured = here[~here["lost"]]
    for number, line in enumerate(in_order(measured["line"])):
        points = measured[measured["line"] == line].sort_values("position")
        style = drawn[line]
        if points["low"].notna().any():
            low, high = points["low"].astype(float), points["high"].astype(float)
            axes.fill_between(points["position"], low, high, color=style.colour, alpha=0.12, linewidth=0)
        every = max(1, len(points) // 6) if len(points) > 8 else 1
        axes.plot(
            points["position"],
            points["value"],
            label=line,
            markersize=5,
            markevery=(number % every, every),  # apart, where lines lie on each other
            linewidth=1.5,
            **line_options(style),
        )
    if here["position"].max() > 4 * max(1.0, here["position"].min()):
        axes.set_xscale("log")
        plain_log(axes.xaxis, thousands=True)
    else:
        axes.xaxis.set_major_formatter("{x:,.0f}")


def _bars(axes: Axes, here: pd.DataFrame, drawn: dict[str, PlotStyle]) -> None:
    """One prompt length leaves nothing to draw a line along."""
    lines = in_order(here["line"])
    values = [float(here.loc[here["line"] == line, "value"].iloc[0]) for line in lines]
    axes.barh(range(len(lines)), values, height=0.6, color=[drawn[line].colour for line in lines], label="_bars")
    axes.set_yticks(range(len(lines)), lines)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_xlabel(f"reading one prompt of {here['position'].iloc[0]:,.0f} tokens (s)")


def _lost(axes: Axes, here: pd.DataFrame, drawn: dict[str, PlotStyle]) -> None:
    """A cross at the top for each cell that ran out of memory, beside each other where contexts agree."""
    out = here[here["lost"]]
    if out.empty:
        return
    top = axes.get_ylim()[1]
    for height, line in enumerate(in_order(out["line"])):
        contexts = out.loc[out["line"] == line, "position"]
        axes.plot(
            contexts,
            [top * (0.97 - 0.05 * height)] * len(contexts),
            linestyle="none",
            marker="x",
            markersize=7,
            markeredgewidth=1.8,
            color=drawn[line].colour,
            label=f"{line}: out of memory",
        )
    axes.set_ylim(top=top)
