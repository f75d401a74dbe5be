"""Names at the ends of lines, moved apart where lines end close together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from evictbench.plot_palette import Style

FONT_SIZE = 9.0
SPACING = 1.35
"""Line height of labels, in font sizes."""


LONGEST = 44
"""Characters of a policy's name, settings included, that a figure has room for."""


def shortened(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with `policy` names that no figure has room for cut in their middle; different ones stay different."""
    if "policy" not in frame or not (frame["policy"].astype(str).str.len() > LONGEST).any():
        return frame
    names: dict[str, str] = {}
    for name in dict.fromkeys(frame["policy"].astype(str)):
        cut = name if len(name) <= LONGEST else f"{name[: LONGEST - 15]}…{name[-14:]}"
        number = 2
        while cut in names.values():
            cut = f"{cut.split(' (')[0]} ({number})"
            number += 1
        names[name] = cut
    return frame.assign(policy=frame["policy"].astype(str).map(names))


class End(NamedTuple):
    """Where a line ends, in data, and the name that goes there. x None: at the right edge. aside: points by which the
    line is drawn to the right of its data."""

    name: str
    x: float | None
    y: float
    style: Style
    aside: float = 0.0


def move_apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Places as near as possible to those wanted (least squares), in their order, at least `gap` apart; then moved
    into [0, 1], or, where they do not fit, from 1 downwards."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # Less the gaps before it, each place may not be below the one before: pool neighbours that are.
    pools: list[tuple[float, int]] = []
    for rank, i in enumerate(order):
        total, count = wanted[i] - rank * gap, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / count:
            earlier, size = pools.pop()
            total, count = total + earlier, count + size
        pools.append((total, count))
    levels = [total / count for total, count in pools for _ in range(count)]
    apart = [level + rank * gap for rank, level in enumerate(levels)]
    for rank in range(len(apart)):
        apart[rank] = max(apart[rank], rank * gap)
    for rank in reversed(range(len(apart))):
        apart[rank] = min(apart[rank], 1 - (len(apart) - 1 - rank) * gap)
    places = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        places[i] = apart[rank]
    return places


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write each name to the right of the axes behind its marker, with a thin line from where its own line ends. Call
    it last: limits and size must not change afterwards."""
    if not ends:
        return
    figure = axes.figure
    box = axes.get_window_extent()
    gap = FONT_SIZE * SPACING * figure.dpi / 72 / box.height
    across = figure.dpi / 72 / box.width
    to_axes = axes.transData + axes.transAxes.inverted()
    points = []
    for end in ends:
        x, y = to_axes.transform((axes.get_xlim()[1] if end.x is None else end.x, end.y))
        points.append((float(x) + end.aside * across, min(1.0, max(0.0, float(y)))))
    bend, marker, text = (1 + points_right * across for points_right in (5, 16, 23))
    for end, (x, y), place in zip(ends, points, move_apart([y for _, y in points], gap), strict=True):
        style = end.style
        axes.plot(
            [x, bend, marker],
            [y, place, place],
            transform=axes.transAxes,
            color=style.colour,
            linewidth=0.6,
            alpha=0.6,
            clip_on=False,
            zorder=1,
            label="_leader",
        )
        axes.plot(
            [marker],
            [place],
            transform=axes.transAxes,
            markersize=5.5,
            clip_on=False,
            label="_marker",
            **style.kwargs(),
        )
        axes.text(
            text,
            place,
            end.name,
            transform=axes.transAxes,
            color="#222222",
            fontsize=FONT_SIZE,
            verticalalignment="center_baseline",
        )
