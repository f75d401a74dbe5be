"""RULER: thirteen synthetic long-context tasks of any length (see README.md, the protocol card)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.suite import PreparedSuite, Suite, SuiteRequest

from .tasks import DEFAULT_CONTEXT, DEFAULT_LIMIT, PROTOCOLS, TASKS, VERSIONS

if TYPE_CHECKING:
    from evictbench.suite.survey import DataFound

__all__ = ["SUITE"]


def _prepare(request: SuiteRequest) -> PreparedSuite:
    from .prepare import prepare  # lazy, so that suites are listed fast

    return prepare(request)


def _survey(data_dir: Path) -> Sequence[DataFound]:
    from .qa_data import survey

    return survey(data_dir)


SUITE = Suite(
    name="ruler",
    summary="13 synthetic tasks at any context length: needles, variable tracking, word counting, QA",
    folder=Path(__file__).parent,
    tasks=tuple(TASKS),
    question="unseen",
    context_field="context",
    default_context=DEFAULT_CONTEXT,
    default_limit=DEFAULT_LIMIT,
    prepare=_prepare,
    survey=_survey,
    protocols=PROTOCOLS,
    versions=tuple(VERSIONS),
)
