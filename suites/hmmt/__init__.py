"""HMMT February and November 2025: sixty competition problems, answers in closed form (see README.md, the protocol
card)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.suite import PreparedSuite, Protocol, Suite, SuiteRequest

from ..boxed import INSTRUCT, KVPOP_SAMPLING, THINKING, THINKING_SOURCE

if TYPE_CHECKING:
    from evictbench.suite.survey import DataFound

__all__ = ["SUITE"]

TASKS = ("hmmt_feb25", "hmmt_nov25")

PROTOCOLS = {
    "default": Protocol(
        source=THINKING_SOURCE,
        tasks=TASKS,
        sampling=THINKING,
    ),
    "kvpop": Protocol(
        source=f"KVpop (arXiv:2607.05061), tables on HMMT February and November 2025: pass@1 over 16 rollouts; "
        f"{KVPOP_SAMPLING}",
        tasks=TASKS,
        sampling=THINKING,
        model_sampling=INSTRUCT,
        repeats=16,
    ),
    "greedy": Protocol(
        source="greedy, once: our choice (Qwen advises against it for thinking)",
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
    name="hmmt",
    summary="HMMT February and November 2025: 60 competition problems, answers compared as mathematics",
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
