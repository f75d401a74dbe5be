r"""Grading mathematics: the last \boxed{} of a response is compared with the gold, as text, then by math-verify."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..boxed import last_boxed
from . import judge

LONGEST = 1000
"""Characters of the longest answer that is compared as mathematics. No gold answer has more than some 150, and a model
that repeats itself may fill a box with thousands."""

_FRAME = re.compile(r"^(?:\*\*|\$|\\\(|\\\[|`)+|(?:\*\*|(?<!\\)\$|\\\)|\\\]|`|(?<=[\w})\]$*])\.)+$")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_BLANKS = re.compile(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])")
_PLAIN = (
    (re.compile(r"\\[dt]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])"), ""),
    (re.compile(r"\\[!,;: ]"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), ""),
    (re.compile("−"), "-"),
)


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float | str]:
    """lm-eval `process_results`: score 1 if the boxed answer equals the gold; `boxed` is 1 if there is a box at all.

    timed_out: 1 if comparing took longer than the limit, which makes the answer wrong. answer: the gold's text where
    the answer equals it, else the answer as math-verify reads it, so that 0.5 and 1/2 vote together.
    """
    content = last_boxed(results[0])
    if content is None:
        return {"score": 0.0, "boxed": 0.0, "timed_out": 0.0, "answer": ""}
    gold, answer = plain(doc["answer"]), plain(content)
    if gold == answer:
        return {"score": 1.0, "boxed": 1.0, "timed_out": 0.0, "answer": gold}
    if len(content) > LONGEST:
        return {"score": 0.0, "boxed": 1.0, "timed_out": 0.0, "answer": answer[:LONGEST]}
    verdict = judge.compare(unframed(doc["answer"]), unframed(content))
    return {
        "score": float(verdict.equal),
        "boxed": 1.0,
        "timed_out": float(verdict.timed_out),
        "answer": gold if verdict.equal else verdict.shown or answer,
    }


def unframed(text: str) -> str:
    """An answer without dollar signs, asterisks or a full stop around it."""
    return _FRAME.sub("", text.strip()).strip()


def plain(text: str) -> str:
    """An answer simplified as text, without reading it as mathematics. Equal texts are equal answers."""
    text = unframed(text)
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    return _BLANKS.sub("", _WRAPPED.sub(r"\1", text)).strip()
