"""RULER: thirteen synthetic long-context tasks of any length (see README.md, the protocol card)."""

from __future__ import annotations

from pathlib import Path

from evictbench.suite import PreparedSuite, Suite, SuiteRequest

from .tasks import DEFAULT_CONTEXT, DEFAULT_LIMIT, TASKS, VERSIONS

__all__ = ["SUITE"]


def _prepare(request: SuiteRequest) -> PreparedSuite:
    from .prepare import prepare  # lazy, so that suites are listed fast

    return prepare(request)


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
    versions=tuple(VERSIONS),
)
