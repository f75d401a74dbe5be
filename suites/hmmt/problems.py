"""Where the problems of HMMT are found, and their answers in LaTeX."""

from __future__ import annotations

from typing import Any

from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Dataset, Layout

from .. import problems
from ..math500.judge import versions
from ..math500.problems import gold


def _dataset(title: str, month: str, revision: str) -> Dataset:
    """One competition. month: "feb" or "nov".

    A record of the hub does not say whose it is, so that a file's name or its folder has to."""
    names = (f"hmmt_{month}25", f"hmmt_{month}_25", f"hmmt_{month}_2025", f"hmmt_{month}2025", f"HMMT_{month}_2025")
    kinds = ("jsonl", "parquet", "json")
    files = [f"{name}.{kind}" for kind in kinds for name in names]
    signs = {"competition": f"hmmt_{month}_2025$"}  # a field that MathArena's collections have
    return Dataset(
        name=title,
        files=(
            *files,
            *(f"hmmt/{file}" for file in files),
            *(f"{name}/{file}" for name in names for file in ("test.jsonl", "train.jsonl")),
            Layout(("data/train-*-of-*.parquet",), signs),
            Layout(("default/train/*.parquet",), signs),
            Layout(("train-*-of-*.parquet",), signs),
            Layout(("train.jsonl",), signs),
        ),
        folder=names[0],
        folders=names[1:],
        documents=30,
        hub=f"MathArena/hmmt_{month}_2025",
        revision=revision,
        config=None,
        split="train",
        fields=(),
    )


DATASETS = {
    "hmmt_feb25": _dataset("HMMT February 2025", "feb", "6fdc4277120810ff75aa22d2d5489b91f7a262a1"),
    "hmmt_nov25": _dataset("HMMT November 2025", "nov", "118dbfb45c4c9467c672268ed55166642897aa46"),
}


def prepare(request: SuiteRequest) -> PreparedSuite:
    """Make the tasks of a request ready, with the versions that verdicts depend on in the result's data; see
    evictbench.suite.spec.Suite for what may be raised."""
    return problems.prepare(request, suite="hmmt", datasets=DATASETS, gold=gold, versions=versions())


def documents(task: str, hmmt_problems: dict[str, list[dict[str, Any]]] | None = None, **_: Any) -> dict[str, Any]:
    """lm-eval `custom_dataset` of both tasks."""
    return problems.dataset(task, hmmt_problems)
