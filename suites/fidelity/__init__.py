"""Fidelity: what eviction does to the distribution itself, teacher-forced (see README.md, the protocol card)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from evictbench.suite import PreparedSuite, Protocol, Suite, SuiteRequest

__all__ = ["SUITE"]

TASKS = ("gsm8k", "longbench", "ruler", "text")


def _prepare(request: SuiteRequest) -> PreparedSuite:
    from .prepare import prepare

    return prepare(request)


def _generator(plan: Any, load: Callable[[Any], Any]) -> Any:
    from .generator import Forced

    return Forced(plan, load(plan))


SUITE = Suite(
    name="fidelity",
    summary="KL, agreement and perplexity against the full cache, teacher-forced over real text",
    folder=Path(__file__).parent,
    tasks=TASKS,
    question="seen",
    context_field=None,
    default_context=2048,
    default_limit=20,
    prepare=_prepare,
    generator=_generator,
    protocols={"default": Protocol(source="this project", tasks=TASKS)},
)
