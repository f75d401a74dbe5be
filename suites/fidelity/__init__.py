"""Fidelity: what eviction does to the distribution itself, teacher-forced (see README.md, the protocol card)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from evictbench.suite import PreparedSuite, Protocol, Suite, SuiteRequest

from ..ruler import SUITE as RULER
from .tasks import DEFAULT_CONTEXT, DEFAULT_LIMIT, TASKS

__all__ = ["SUITE"]


def _prepare(request: SuiteRequest) -> PreparedSuite:
    from .prepare import prepare  # lazy, so that suites are listed fast

    return prepare(request)


def _generator(plan: Any, load: Callable[[Any], Any]) -> Any:
    from .generator import TeacherForced

    return TeacherForced(plan, load(plan))


SUITE = Suite(
    name="fidelity",
    summary="KL, agreement and perplexity against the full cache, teacher-forced over real text",
    folder=Path(__file__).parent,
    tasks=TASKS,
    question="seen",
    context_field=None,
    default_context=DEFAULT_CONTEXT,
    default_limit=DEFAULT_LIMIT,
    prepare=_prepare,
    generator=_generator,
    protocols={"default": Protocol(source="this project", tasks=TASKS)},
    versions=RULER.versions,
)
