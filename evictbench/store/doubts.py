"""Scores of the full cache that say more about the protocol than about the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

LEAST_SAMPLES = 10
"""A full cache that scores 0 on fewer samples than this is not remarked upon."""

MOST_SHORT = 0.5
"""The share of answers that may be wrong and at most one token long, where more than one is allowed."""


def doubts(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each task whose full cache scores 0 throughout, or answers mostly with nothing or one token.

    lines: samples of a run of the full cache, with `task`, `score`, `output_tokens`, `token_limit`, `truncated`.
    """
    by_task: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_task.setdefault(str(line["task"]), []).append(line)
    for task, samples in by_task.items():
        count = len(samples)
        wrong = [line for line in samples if line["score"] == 0]
        short = sum(line["output_tokens"] <= 1 < line["token_limit"] for line in wrong)
        if count < LEAST_SAMPLES:
            continue
        if short > MOST_SHORT * count:
            yield (
                f"{task}: {short} of {count} answers of the full cache are wrong and at most one token long, so they "
                "end before they have begun: look at the chat template, the end tokens and the stop strings before "
                "comparing policies."
            )
        elif len(wrong) == count:
            cut = sum(bool(line["truncated"]) for line in samples)
            why = f"; {cut} of the answers are cut off by the token limit" if cut > MOST_SHORT * count else ""
            yield (
                f"{task}: the full cache scores 0 on all {count} samples, so no policy can be told from another: the "
                f"protocol does not fit the model, or the task is beyond it{why}."
            )
