"""AIME 2024 and 2025: sixty competition problems whose answers are integers (see README.md, the protocol card)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.suite import PreparedSuite, Protocol, Suite, SuiteRequest

from ..boxed import INSTRUCT, KVPOP_SAMPLING, THINKING, THINKING_SOURCE

if TYPE_CHECKING:
    from evictbench.suite.survey import DataFound

__all__ = ["SUITE"]

TASKS = ("aime24", "aime25")

PROTOCOLS = {
    "default": Protocol(
        source=THINKING_SOURCE,
        tasks=TASKS,
        sampling=THINKING,
    ),
    "kvpop": Protocol(
        source=f"KVpop (arXiv:2607.05061), tables on AIME 24 and 25: pass@1 over 16 rollouts; {KVPOP_SAMPLING}",
        tasks=TASKS,
        sampling=THINKING,
        model_sampling=INSTRUCT,
        repeats=16,
    ),
    "indexmem_pp": Protocol(
        source="IndexMem++ (Chooovy/kvpress 5a5826ed, docs/paper_protocols.md, configs/evaluation/aime25.yaml): AIME "
        "25, 8 rollouts, thinking on, at most 32,768 tokens",
        tasks=("aime25",),
        sampling=THINKING,
        repeats=8,
        thinking=True,
        max_new_tokens=32_768,
    ),
    "greedy": Protocol(
        source="lm-eval 0.4.13, aime24 and aime25: greedy, once (Qwen advises against it for thinking)",
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
    name="aime",
    summary="AIME 2024 and 2025: 60 competition problems, integer answers, long reasoning",
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
