"""Worked examples drawn from GSM8K's train set, for a protocol whose examples are from there."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from evictbench.errors import UserError
from evictbench.suite.datasets import Dataset, Layout, load, place

from . import prompts

SHOTS, SEED = 8, 0
"""How many examples there are, and the seed of the draw: the same in every run, whatever its --seed."""

_CALCULATION = re.compile(r"<<[^>]*>>")
_SIGNS = {"question": ""}

TRAIN = Dataset(
    name="GSM8K train",
    files=(
        Layout(("train.jsonl",), _SIGNS),
        Layout(("train.parquet",), _SIGNS),
        Layout(("main/train-00000-of-00001.parquet",), _SIGNS),
        "gsm8k_train.jsonl",
        "grade_school_math/data/train.jsonl",
        Layout(("main/train-*-of-*.parquet",), _SIGNS),
        Layout(("main/train/*.parquet",), _SIGNS),
        Layout(("data/train.jsonl",), _SIGNS),
    ),
    folder="gsm8k",
    folders=("GSM8K", "grade-school-math", "grade-school-math-master"),
    hub="openai/gsm8k",
    revision="cc7b047b6e5bb11b4f1af84efc572db110a51b3c",
    config="main",
    split="train",
    fields=("question", "answer"),
    documents=7473,
)


@dataclass(frozen=True)
class Exemplars:
    """The examples of a prompt. text: each with its blank line. data: of the result. warnings: for the user."""

    text: str
    data: dict[str, str]
    warnings: tuple[str, ...]


def draw(data_dir: Path | None) -> Exemplars:
    """Draw the examples from the train set in `data_dir`, or from the hub.

    Raises UserError where it is not there, is too small, or a drawn problem has no solution that ends with ####.
    """
    loaded = load(TRAIN, data_dir)
    count = len(loaded.records)
    where = place(loaded.origin, data_dir)
    if count < SHOTS:
        raise UserError(f"{where} has {count} problems, and {SHOTS} worked examples are drawn from it.")
    drawn = random.Random(SEED).sample(range(count), SHOTS)
    shown = [_example(loaded.records[row], f"{where}: record {row + 1}") for row in drawn]
    numbers = ", ".join(str(row + 1) for row in drawn)
    warnings = []
    if count != TRAIN.documents:
        warnings.append(
            f"{loaded.origin} has {count} problems, and GSM8K's train set {TRAIN.documents}: the worked examples are "
            "not those that are drawn from the whole."
        )
    return Exemplars(
        "".join(shown),
        {loaded.origin: f"sha256:{loaded.sha256}", "examples": f"records {numbers}, drawn with seed {SEED}"},
        tuple(warnings),
    )


def _example(record: dict[str, object], where: str) -> str:
    """A solved problem as an example: its steps a line each, without the calculator's marks, then the answer."""
    steps, marker, answer = _CALCULATION.sub("", str(record["answer"])).rpartition("####")
    lines = [line.strip() for line in steps.splitlines() if line.strip()]
    if not marker or not lines or not answer.strip():
        raise UserError(f"{where}: the answer is no solution that ends with #### and a number.")
    return prompts.example(str(record["question"]).strip(), "\n".join(lines), answer.strip())
