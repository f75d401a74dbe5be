"""Grading: the number in the last box, or after the last "The answer is", is compared as a number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from ..boxed import last_boxed
from ..marked import marked
from .numbers import last_number, number, spelled

_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(?!\s*\})")
_HASHES = re.compile(r"####\s*([^\n]+)")

Grades = dict[str, float | str]


def boxed(doc: Mapping[str, Any], results: Sequence[str]) -> Grades:
    """lm-eval `process_results` of the zero-shot prompt.

    Without any box, an answer after a marker counts; a box that never closes is a wrong answer.
    score: 1 if the number is right. flexible: 1 if the last number of the text is right (as in lm-eval's
    flexible-extract). answer: the number in plain digits, "" for none.
    """
    text = results[0]
    content = last_boxed(text)
    if content is not None:
        return _graded(doc, text, number(content))
    return _graded(doc, text, None if _OPEN_BOX.search(text) else _marked_number(text))


def chain_of_thought(doc: Mapping[str, Any], results: Sequence[str]) -> Grades:
    """lm-eval `process_results` of the 8-shot prompt: the metrics of `boxed` for the last "The answer is N."."""
    return _graded(doc, results[0], _marked_number(results[0]))


def _marked_number(text: str) -> Fraction | None:
    """The number after the last marker that has one. #### is GSM8K's own marker, for models trained on it."""
    hashes = reversed(_HASHES.findall(text))
    return next((value for answer in (*marked(text), *hashes) if (value := number(answer)) is not None), None)


def _graded(doc: Mapping[str, Any], text: str, value: Fraction | None) -> Grades:
    gold = Fraction(doc["answer"])
    return {
        "score": float(value == gold),
        "flexible": float(last_number(text) == gold),
        "answer": spelled(value),
    }
