r"""Grading integers in boxes: the last \boxed{} of a response is read as an integer and compared with the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..boxed import last_boxed

_FRAME = re.compile(r"\\\(|\\\)|\\\[|\\\]|\\displaystyle|\\left(?![a-z])|\\right(?![a-z])|\\?\$|[*`]")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mathit|mbox|bf|rm)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[\d}])\s*\\(?:text|textrm|mathrm|mbox)\s*\{[^{}\d]*\}(?:\^\{?\d\}?)?\s*$")
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\bdegrees?\b)\s*$")
_THOUSANDS = re.compile(r"(?<=\d)(?:,\\!|\{,\}|,|\\,|\\!|\\;|\\ )(?=\d{3}(?!\d))")
_LEFT_SIDE = re.compile(r"^.*(?<![<>!:])=", re.DOTALL)
_INTEGER = re.compile(r"([+-]?)\s*0*(\d+)(?:\.0*)?", re.ASCII)


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float | str]:
    """lm-eval `process_results`: score 1 if the boxed integer is the answer; `boxed` is 1 if there is a box at all.

    answer: the integer in plain digits; the content of a box that holds no integer; "" without a box.
    """
    content = last_boxed(results[0])
    value = integer(content) if content is not None else None
    return {
        "score": float(value is not None and value == doc["answer"]),
        "boxed": float(content is not None),
        "answer": str(value) if value is not None else content or "",
    }


def integer(text: str) -> int | None:
    r"""The integer that a short text shows, or None.

    These are ignored: leading zeros, a fraction of zeros, dollar signs and other frames, \text{} and its like, degrees,
    units in \text{} behind the number, commas and thin spaces between thousands, and all before the last equals sign.
    Nothing is computed: \frac{50}{2} and 2^5 are no integers here.
    """
    text = _FRAME.sub("", text).replace("−", "-").strip()
    text = _DEGREES.sub("", _UNIT.sub("", text))
    text = _LEFT_SIDE.sub("", _WRAPPED.sub(r"\1", text)).strip().rstrip(".").strip()
    text = _DEGREES.sub("", _THOUSANDS.sub("", text)).strip("{} ")
    match = _INTEGER.fullmatch(text)
    if match is None or len(match[2]) > 18:
        return None
    return int(match[1] + match[2])
