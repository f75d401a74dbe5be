"""MATH-500: five hundred competition problems of the MATH test set (see README.md, the protocol card)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.suite import PreparedSuite, Protocol, Suite, SuiteRequest

from ..boxed import THINKING, THINKING_SOURCE

if TYPE_CHECKING:
    from evictbench.suite.survey import DataFound

__all__ = ["SUITE"]

TASKS = ("math500",)

PROTOCOLS = {
    "default": Protocol(
        source=THINKING_SOURCE,
        tasks=TASKS,
        sampling=THINKING,
    ),
    "indexmem_pp": Protocol(
        source="IndexMem++ (Chooovy/kvpress 5a5826ed, docs/paper_protocols.md, configs/evaluation/math500.yaml): 2 "
        "rollouts, thinking on, at most 16,384 tokens, as recorded (the manuscript has 32,768)",
        tasks=TASKS,
        sampling=THINKING,
        repeats=2,
        thinking=True,
        max_new_tokens=16_384,
    ),
    "greedy": Protocol(
        source="lm-eval 0.4.13, hendrycks_math500 and minerva_math500: greedy, once (Qwen advises against it for "
        "thinking)",
        tasks=TASKS,
    ),
}


def _prepare(request: SuiteRequest) -> PreparedSuite:
    from .problems import prepare  # lazy, so that suites are listed fast

    return prepare(request)


def _survey(data_dir: Path) -> Sequence[DataFound]:
    from evictbench.suite.survey import survey

    from .problems import DATASETS

    return survey(DATASETS, data_dir)


SUITE = Suite(
    name="math500",
    summary="MATH-500: competition mathematics, answers compared as mathematics",
    folder=Path(__file__).parent,
    tasks=TASKS,
    question="seen",
    context_field=None,
    default_context=None,
    default_limit=None,
    prepare=_prepare,
    survey=_survey,
    protocols=PROTOCOLS,
    stated_length=16_384,
)
