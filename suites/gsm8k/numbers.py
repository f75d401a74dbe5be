r"""Numbers as answers spell them: $1,000.50, 18.00, -3, 1/2, \frac{1}{2}, 2 1/2."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

_SPELLINGS = (
    ("−", "-"),
    (r"\$", "$"),
    (r"\%", "%"),
    ("{,}", ","),
    (r"\dfrac", r"\frac"),
    (r"\tfrac", r"\frac"),
    (r"\approx", "="),
    ("≈", "="),
)
_THIN_SPACE = re.compile(r"(?<=\d),?\\[,!;: ](?=\d{3}(?!\d))")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|boxed|fbox)\s*\{([^{}]*)\}")
_LATEX_FRACTION = re.compile(r"\\frac\s*(?:\{\s*([\d,.]+)\s*\}\s*\{\s*([\d,.]+)\s*\}|(\d)\s*(\d))")
_POWER_OF_UNIT = re.compile(r"(?<![\d\s])\s*\^\s*(?:\{[^{}]*\}|\\?\w+)|\^\s*\{?\s*\\circ\s*\}?")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+"
_NUMBER = re.compile(
    rf"(?P<minus>(?<![\w)])-|\A\s*-\s)?[$€£]?(?P<minus2>(?<=[$€£])-)?"
    rf"(?<![A-Za-z_\d])(?P<value>{_DIGITS})(?:\s*/\s*(?P<under>\d+)(?![\d.])|\s+(?P<over>\d+)\s*/\s*(?P<part>\d+)\b)?"
)
_LONGEST = 100  # characters; Python refuses to read integers of thousands of digits
_ENUMERATES = re.compile(r"\s*(?:,|;|\band\b|\bor\b|\bto\b|&)\s*[$€£]?\s*")


def number(answer: str) -> Fraction | None:
    """The number that an answer gives: the first one, which units may follow, or in an equation the first one behind
    the last equals sign. None for an answer without a number, with several (10, 20 or 30), or with a power.
    """
    text = _plain(answer)
    if "=" in text:
        sides = [side for side in text.split("=") if _NUMBER.search(side)]
        text = sides[-1] if sides else ""
    matches = list(_NUMBER.finditer(text))
    if not matches or text[matches[0].end() :].lstrip().startswith("^"):
        return None
    if len(matches) > 1 and _ENUMERATES.fullmatch(text[matches[0].end() : matches[1].start()]):
        return None
    return _value(matches[0])


def last_number(text: str) -> Fraction | None:
    """The last number of a whole text, whatever it stands for."""
    last = deque(_NUMBER.finditer(_plain(text)), maxlen=1)
    return _value(last[0]) if last else None


def spelled(value: Fraction | None) -> str:
    """A number in one spelling, for comparing answers with each other: 18, -3, 1/2; "" for none."""
    return "" if value is None else str(value)


def _plain(text: str) -> str:
    for old, new in _SPELLINGS:
        text = text.replace(old, new)
    text = _THIN_SPACE.sub("", text)
    text = _LATEX_FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]} ", text)
    return _POWER_OF_UNIT.sub("", _WRAPPED.sub(r" \1 ", text))


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _LONGEST:
        return None
    value = Fraction(match["value"].replace(",", ""))
    try:
        if match["under"]:
            value /= int(match["under"])
        elif match["part"]:
            value += Fraction(int(match["over"]), int(match["part"]))
    except ZeroDivisionError:
        return None
    return -value if match["minus"] or match["minus2"] else value
