"""One colour, marker and line per policy, the same in every figure.

The colours were searched for so that the closest two stay far apart under normal sight and under each of the three
colour blindnesses (at least 26 in CIE Lab, simulated after Machado, Oliveira and Fernandes 2009) while all stand out
from white. In grey print, markers and lines tell policies apart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

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
