"""LongBench: 21 long-context tasks in English, Chinese and code (see README.md, the protocol card)."""

from __future__ import annotations

from pathlib import Path

from evictbench.suite import PreparedSuite, Suite, SuiteRequest

from .tasks import PROTOCOLS, TASKS

__all__ = ["SUITE"]


def _prepare(request: SuiteRequest) -> PreparedSuite:
    from .prepare import prepare  # lazy, so that suites are listed fast

    return prepare(request)


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
    protocols=PROTOCOLS,
)
