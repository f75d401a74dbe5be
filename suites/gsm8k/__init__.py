"""GSM8K: 1,319 grade-school word problems whose answers are numbers (see README.md, the protocol card)."""

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

    from .prepare import DATASET

    return survey({"gsm8k": DATASET}, data_dir)


SUITE = Suite(
    name="gsm8k",
    summary="GSM8K: 1,319 word problems with a number as the answer, zero-shot or after 8 worked examples",
    folder=Path(__file__).parent,
    tasks=TASKS,
    question="seen",
    context_field=None,
    default_context=None,
    default_limit=None,
    prepare=_prepare,
    survey=_survey,
    protocols=PROTOCOLS,
)
