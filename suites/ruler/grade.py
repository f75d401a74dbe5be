"""Scoring: which references are found in the generated text. The answer prefix is never part of that text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(response: str) -> str:
    """The response stripped, with every control character (newlines included) as a newline."""
    return _CONTROL.sub("\n", response.strip()).strip()


def found(response: str, references: Sequence[str]) -> list[bool]:
    """For each reference, whether it is a substring of the cleaned response, whatever the case."""
    text = clean(response).lower()
    return [reference.lower() in text for reference in references]


def score_all(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval `process_results`: the fraction of the references that are found, 0 to 1."""
    hits = found(results[0], doc["outputs"])
    return {"score": sum(hits) / len(hits)}


def score_part(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval `process_results`: 1 if any reference is found, else 0; never divided by their number."""
    return {"score": float(any(found(results[0], doc["outputs"])))}
