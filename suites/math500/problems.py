"""Where the problems of MATH-500 are found, and their answers in LaTeX."""

from __future__ import annotations

from typing import Any

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Dataset, Layout

from .. import problems
from ..typesetting import LONGEST
from .judge import versions

_SIGNS = {"problem": "", "unique_id": ""}
"""Fields by which a record is one of MATH where the file's name does not say so."""

DATASET = Dataset(
    name="MATH-500",
    files=(
        "math500.jsonl",
        "math500.parquet",
        "math500.json",
        "math_500.jsonl",
        "MATH-500/test.jsonl",
        "math500/test.jsonl",
        "MATH500.jsonl",
        "MATH-500.jsonl",
        "math_500.parquet",
        "math_500.json",
        "math_splits/test.jsonl",
        "prm800k/math_splits/test.jsonl",
        Layout(("test.jsonl",), _SIGNS),
        Layout(("test-*-of-*.parquet",), _SIGNS),
        Layout(("data/test-*-of-*.parquet",), _SIGNS),
        Layout(("default/test/*.parquet",), _SIGNS),
    ),
    folder="math500",
    folders=("MATH500", "math_500", "prm800k"),
    hub="HuggingFaceH4/MATH-500",
    revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    config=None,
    split="test",
    fields=(),
    documents=500,
)
DATASETS = {"math500": DATASET}


def prepare(request: SuiteRequest) -> PreparedSuite:
    """Make the task of a request ready, with the versions that verdicts depend on in the result's data; see
    evictbench.suite.spec.Suite for what may be raised."""
    return problems.prepare(request, suite="math500", datasets=DATASETS, gold=gold, versions=versions())


def gold(answer: str, where: str) -> str:
    """The answer of a record, in LaTeX. Raises UserError if no response could equal it: its braces do not balance, or
    it is longer than any answer that is read."""
    if len(answer) > LONGEST:
        raise UserError(f"{where}: the answer has {len(answer):,} characters, more than the {LONGEST:,} that are read.")
    depth = 0
    for index, character in enumerate(answer):
        if character in "{}" and answer[index - 1 : index] != "\\":
            depth += 1 if character == "{" else -1
        if depth < 0:
            break
    if depth:
        raise UserError(f"{where}: the braces of the answer {answer!r} do not balance.")
    return answer.strip()


def documents(task: str, math500_problems: dict[str, list[dict[str, Any]]] | None = None, **_: Any) -> dict[str, Any]:
    """lm-eval `custom_dataset` of the task."""
    return problems.dataset(task, math500_problems)
