"""How figures draw a policy."""

from __future__ import annotations

from dataclasses import dataclass

Line = str | tuple[int, tuple[float, ...]]
"""What matplotlib takes: "-" for a solid line, or an offset and the lengths of dashes and gaps, in line widths."""

DASHED: Line = (0, (4, 2))
DOTTED: Line = (0, (1, 1.5))
DASH_DOT: Line = (0, (6, 1.5, 1, 1.5))
LONG: Line = (0, (9, 1.5))
DASH_DOT_DOT: Line = (0, (6, 1.5, 1, 1.5, 1, 1.5))


@dataclass(frozen=True)
class PlotStyle:
    """The colour, marker and line of a policy.

    colour: "#rrggbb". marker: one of matplotlib's. hollow: the marker is white inside. yardstick: the policy is no
    method but what methods are measured against, and its line is thin. place: its place in legends, the smallest first.
    """

    colour: str
    marker: str
    line: Line = "-"
    hollow: bool = False
    yardstick: bool = False
    place: int = 100
