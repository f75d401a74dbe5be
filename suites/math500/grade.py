r"""Grading mathematics: the last \boxed{} of a response is compared with the gold, as text, then by math-verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..boxed import last_boxed
from ..typesetting import LONGEST
from . import judge
from .notation import by_notation, plain, spelled


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float | str]:
    """lm-eval `process_results`: score 1 if the boxed answer equals the gold; `boxed` is 1 if there is a box at all.

    An answer of more than LONGEST characters is wrong and not read. A percent sign is a unit, as it is to MATH's own
    script: 10% is 10, and not 0.1. timed_out: 1 if comparing took longer than the limit, which makes the answer wrong.
    answer: the gold's text where the answer equals it, else the answer as math-verify reads it, so that 0.5 and 1/2
    vote together.
    """
    content = last_boxed(results[0])
    if content is None:
        return {"score": 0.0, "boxed": 0.0, "timed_out": 0.0, "answer": ""}
    if len(content) > LONGEST:
        return {"score": 0.0, "boxed": 1.0, "timed_out": 0.0, "answer": content[:LONGEST]}
    gold, answer = spelled(doc["answer"]), spelled(content)
    equal = by_notation(gold, answer)
    verdict = judge.Verdict(equal) if equal is not None else judge.compare(gold, answer)
    return {
        "score": float(verdict.equal),
        "boxed": 1.0,
        "timed_out": float(verdict.timed_out),
        "answer": plain(gold) if verdict.equal else verdict.shown or plain(answer),
    }
