r"""Grading integers in boxes: the last \boxed{} of a response is read as an integer and compared with the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..boxed import last_boxed
from ..typesetting import LONGEST, RULES, Rule, bare, rule
from ..wording import ANNOUNCED, HEDGES

NOTATION: tuple[Rule, ...] = (
    *RULES,
    Rule(ANNOUNCED, lambda match: match[1] or "", "the answer is 60"),
    rule(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])", "", r"\left(60\right)"),
    rule(r"\s*(?:\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])|°)", "", "degrees"),
    rule(r"(?<=\d)\s*\\?%$", "", "percent"),
    rule(r"(?<=\d)[, ](?=\d{3}(?!\d))", "", "thousands: 1,000"),
    rule(r"^(\\text\s*\{)?\s*\([A-E]\)\s*(?:\\text\s*\{\s*\}|(?=[\d\\}]))", lambda match: match[1] or "", "(A) 60"),
    rule(r"^\\text\s*\{\s*\}\s*", "", "what that leaves of a choice's letter"),
    rule(r"^\(([^()]*)\)$", r"\1", "(113)"),
    rule(r"(?<![\w^}])\{\s*(-?\d+)\s*\}", r"\1", "{60} ways"),
    rule(r"(?<=\d)\s*_\s*\{?\s*(?:10|\\text\s*\{\s*ten\s*\})\s*\}?$", "", "60_{10}"),
    rule(r"^.*(?:(?<![<>!:])=|\\equiv(?![A-Za-z])|≡)", "", "m + n = 60: the last side counts"),
)
"""What is read away before the integer."""

_POWER = r"(?:\s*\^\s*\{?\s*\d\s*\}?|[²³])?"
_WORD = r"(?:[A-Za-z]{3,}|cm|mm|km|in|ft|mi|yd|kg|sq|of)"
_UNIT = rf"(?:\s*\\(?:text|mathrm)\s*\{{[^{{}}\d=]*\}}{_POWER}|\s+{_WORD}(?:[\s.-]+{_WORD})*{_POWER})"
_MODULUS = (
    r"\s*(?:\\(?:text|mathrm)\s*\{\s*)?\(?\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?:\\[pb]?mod|mod(?:ulo)?)(?![A-Za-z])\s*\}?"
    r"\s*\{?\s*(?P<modulus>\d{1,9})\s*\}?\s*\)?\s*\}?"
)
_INTEGER = re.compile(rf"(?P<sign>[+-]?)\s*0*(?P<digits>\d+)(?:\.0*)?(?:{_MODULUS}|(?P<unit>{_UNIT}+))?", re.ASCII)
_SEVERAL_EQUATIONS = re.compile(r"=[^=,;]*[,;](?!\d{3})[^=]*=")
_NO_UNIT = re.compile(
    r"\b(?:or|and|to|mod|modulo|times|plus|minus|over|divided|squared|cubed|factorial|hundred|thousand|million|billion|"
    r"dozen|half|point|is|are|if|when|where|for|through|base|pi)\b",
    re.IGNORECASE,
)


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float | str]:
    """lm-eval `process_results`: score 1 if the boxed integer is the answer; `boxed` is 1 if there is a box at all.

    answer: the integer in plain digits; the content of a box that holds no integer, at most LONGEST characters of it;
    "" without a box.
    """
    content = last_boxed(results[0])
    value = integer(content) if content is not None else None
    return {
        "score": float(value is not None and value == doc["answer"]),
        "boxed": float(content is not None),
        "answer": str(value) if value is not None else (content or "")[:LONGEST],
    }


def integer(text: str) -> int | None:
    r"""The integer that a text of at most LONGEST characters shows, or None.

    What NOTATION names is read away, and leading zeros, a fraction of zeros, a unit in words, and a modulus that the
    integer is less than. Nothing is computed: \frac{50}{2} and 2^5 are no integers here, nor is "60 or 61".
    """
    if len(text) > LONGEST or HEDGES.search(text):
        return None
    text = bare(text)
    match = None if _SEVERAL_EQUATIONS.search(text) else _INTEGER.fullmatch(bare(text, NOTATION))
    if match is None or len(match["digits"]) > 18 or _NO_UNIT.search(match["unit"] or ""):
        return None
    value = int(match["sign"] + match["digits"])
    return value if match["modulus"] is None or 0 <= value < int(match["modulus"]) else None
