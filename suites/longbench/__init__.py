"""LongBench: 21 long-context tasks in English, Chinese and code (see README.md, the protocol card)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.suite import PreparedSuite, Suite, SuiteRequest

from .tasks import PROTOCOLS, TASKS

if TYPE_CHECKING:
    from evictbench.suite.survey import DataFound

__all__ = ["SUITE"]


def _prepare(request: SuiteRequest) -> PreparedSuite:
    from .prepare import prepare  # lazy, so that suites are listed fast

    return prepare(request)


def _survey(data_dir: Path) -> Sequence[DataFound]:
    from evictbench.suite.survey import survey

    from .prepare import DATASETS

    return survey(DATASETS, data_dir)


SUITE = Suite(
    name="longbench",
    summary="21 long-context tasks (QA, summaries, few-shot, synthetic, code), over-long prompts cut in the middle",
    folder=Path(__file__).parent,
    tasks=tuple(TASKS),
    question="unseen",
    context_field="context",
    default_context=None,
    default_limit=None,
    prepare=_prepare,
    survey=_survey,
    protocols=PROTOCOLS,
)
