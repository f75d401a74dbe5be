"""Where the problems of AIME are found, and their answers as integers."""

from __future__ import annotations

from typing import Any

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Dataset, Layout

from .. import problems
from .grade import integer

DATASETS = {
    "aime24": Dataset(
        name="AIME 2024",
        files=(
            "aime24.jsonl",
            "aime24.parquet",
            "aime24.json",
            "aime_2024.jsonl",
            "aime24/test.jsonl",
            "aime_2024_problems.parquet",
            "AIME_2024/aime_2024_problems.parquet",
            "aime_2024/data/train-00000-of-00001.parquet",
            "aime2024.jsonl",
            "AIME2024.jsonl",
            "aime2024.json",
            "aime2024.parquet",
            "aime_2024.json",
            "aime_2024.parquet",
            "test2024.jsonl",
            "eval/data/aime/test2024.jsonl",
            Layout(("data/train-*-of-*.parquet",), {"year": "^2024$"}),
            Layout(("default/train/*.parquet",), {"year": "^2024$"}),
            Layout(("train-*-of-*.parquet",), {"year": "^2024$"}),
            Layout(("test.jsonl",), {"year": "^2024$"}),
        ),
        folder="aime",
        folders=("AIME", "aime24", "aime2024", "AIME-Preview"),
        repositories=("Maxwell-Jia/AIME_2024",),
        documents=30,
        hub="HuggingFaceH4/aime_2024",
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        config=None,
        split="train",
        fields=(),
    ),
    "aime25": Dataset(
        name="AIME 2025",
        files=(
            "aime25.jsonl",
            "aime25.parquet",
            "aime25.json",
            "aime_2025.jsonl",
            "aime25/test.jsonl",
            "aime_2025/data/train-00000-of-00001.parquet",
            Layout(("aime2025-I.jsonl", "aime2025-II.jsonl")),
            Layout(("test2025-I.jsonl", "test2025-II.jsonl")),
            Layout(("eval/data/aime/test2025-I.jsonl", "eval/data/aime/test2025-II.jsonl")),
            "aime2025.jsonl",
            "AIME2025.jsonl",
            "aime2025.json",
            "aime2025.parquet",
            "aime_2025.json",
            "aime_2025.parquet",
            Layout(("data/train-*-of-*.parquet",), {"year": "^2025$"}),
            Layout(("default/train/*.parquet",), {"year": "^2025$"}),
            Layout(("train-*-of-*.parquet",), {"year": "^2025$"}),
            Layout(("data/test-*-of-*.parquet",), {"year": "^2025$"}),
            Layout(("default/test/*.parquet",), {"year": "^2025$"}),
            Layout(("test.jsonl",), {"year": "^2025$"}),
        ),
        folder="aime",
        folders=("AIME", "aime25", "aime2025", "AIME-Preview"),
        repositories=("opencompass/AIME2025", "yentinglin/aime_2025", "MathArena/aime_2025"),
        documents=30,
        hub="math-ai/aime25",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        config=None,
        split="test",
        fields=(),
    ),
}


def prepare(request: SuiteRequest) -> PreparedSuite:
    """Make the tasks of a request ready; see evictbench.suite.spec.Suite for what may be raised."""
    return problems.prepare(request, suite="aime", datasets=DATASETS, gold=gold)


def gold(answer: str, where: str) -> int:
    """The answer of a record as an integer: "025" and 25 are the same. Raises UserError unless it is from 0 to 999."""
    value = integer(answer)
    if value is None or not 0 <= value <= 999:
        raise UserError(f"{where}: the answer {answer!r} is not an integer from 0 to 999, as AIME's are.")
    return value


def documents(task: str, aime_problems: dict[str, list[dict[str, Any]]] | None = None, **_: Any) -> dict[str, Any]:
    """lm-eval `custom_dataset` of both tasks."""
    return problems.dataset(task, aime_problems)
