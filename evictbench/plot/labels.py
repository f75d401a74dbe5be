"""Names at the ends of lines, moved apart where lines end close together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from evictbench.plot.style import line_options

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from evictbench.policy.plot_style import PlotStyle


FONT_SIZE = 9.0
"""The font size of a policy's name, in points."""

SPACING = 1.35
"""Line height of labels, in font sizes."""

LONGEST = 36
"""Characters of a policy's name, settings included, that a figure has room for."""

SHOWN = ("policy", "line", "panel")
"""Columns of numbers whose words a figure shows, and that name policies."""


def shortened(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with shorter names for policies whose names no figure has room for; different names stay different."""
    if "policy" not in frame:
        return frame
    names = short_names(frame["policy"].astype(str))
    if not names:
        return frame

    def shorter(text: object) -> object:
        for name, short in names.items():
            text = text.replace(name, short) if isinstance(text, str) else text
        return text

    return frame.assign(**{column: frame[column].map(shorter) for column in SHOWN if column in frame})


def short_names(labels: Iterable[str]) -> dict[str, str]:
    """A shorter name for each label longer than `LONGEST`, the longest label first.

    The name has the settings that not all long labels of the policy share, or else the two ends of the label. Where two
    names would be the same, a number follows, which may make them longer than `LONGEST`.
    """
    every = dict.fromkeys(labels)
    names = {label: "" for label in sorted(every, key=len, reverse=True) if len(label) > LONGEST}
    taken = {label for label in every if label not in names}
    for label in names:
        policy, _, own = label.partition(":")
        settings = [set(other.partition(":")[2].split(",")) for other in names if other.partition(":")[0] == policy]
        shared = set.intersection(*settings)
        telling = [setting for setting in own.split(",") if setting not in shared]
        short = f"{policy}:{','.join(['…', *telling])}" if telling and shared else label
        if len(short) > LONGEST:
            short = f"{short[: LONGEST - 15]}…{short[-14:]}"
        numbered = (f"{short} ({number})" for number in itertools.count(2))
        names[label] = short if short not in taken else next(name for name in numbered if name not in taken)
        taken.add(names[label])
    return names


class End(NamedTuple):
    """The end of a line and the name that goes there.

    x, y: in data; x None is the right edge. style: of the line. aside: points by which the line is drawn to the right
    of its data.
    """

    name: str
    x: float | None
    y: float
    style: PlotStyle
    aside: float = 0.0


def move_apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Places as near as possible to those wanted (least squares), in the same order and at least `gap` apart.

    They are then moved into [0, 1], or, where they do not fit, from 1 downwards.
    """
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
    """Write each name to the right of the axes behind its marker, with a thin line to the end of its own line.

    Limits and size of the axes must not change afterwards.
    """
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
        axes.plot(
            [x, bend, marker],
            [y, place, place],
            transform=axes.transAxes,
            color=end.style.colour,
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
            **line_options(end.style),
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
