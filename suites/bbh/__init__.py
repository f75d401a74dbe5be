"""BIG-Bench Hard: 27 reasoning tasks, 6,511 questions, after three examples (see README.md, the protocol card)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.suite import PreparedSuite, Protocol, Suite, SuiteRequest

from .tasks import COT, DIRECT

if TYPE_CHECKING:
    from evictbench.suite.survey import DataFound

__all__ = ["SUITE"]

PROTOCOLS = {
    "default": Protocol(
        source="Suzgun et al. (arXiv:2210.09261): 3-shot chain of thought; prompts and 1,024 tokens as lm-eval 0.4.13, "
        "bbh_cot_fewshot; greedy",
        tasks=tuple(COT),
        chat=False,
    ),
    "direct": Protocol(
        source="Suzgun et al. (arXiv:2210.09261): 3-shot, answers only; prompts and 256 tokens as lm-eval 0.4.13, "
        "bbh_fewshot; greedy",
        tasks=tuple(DIRECT),
        chat=False,
    ),
    "distillcache": Protocol(
        source="DistillCache (arXiv:2608.08878): BBH 3-shot direct, greedy, 512 new tokens",
        tasks=tuple(DIRECT),
        chat=False,
        max_new_tokens=512,
    ),
}


def _prepare(request: SuiteRequest) -> PreparedSuite:
    from .prepare import prepare  # lazy, so that suites are listed fast

    return prepare(request)


def _survey(data_dir: Path) -> Sequence[DataFound]:
    from evictbench.suite.survey import survey

    from .prepare import DATASETS

    return survey(DATASETS, data_dir)


SUITE = Suite(
    name="bbh",
    summary="BIG-Bench Hard: 27 reasoning tasks after three examples, with chains of thought or answers only",
    folder=Path(__file__).parent,
    tasks=(*COT, *DIRECT),
    question="seen",
    context_field=None,
    default_context=None,
    default_limit=None,
    prepare=_prepare,
    survey=_survey,
    protocols=PROTOCOLS,
)
