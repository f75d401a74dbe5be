"""The problems of GSM8K, made into documents for each prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Dataset, Documents, Layout, Record, incomplete, load, place
from evictbench.suite.tasks import prepared_documents, task_names

from . import exemplars, prompts
from .numbers import number, spelled
from .tasks import FROM_TRAIN, PROTOCOLS, TASKS

_SIGNS = {"question": ""}
"""The field by which a record may be one of GSM8K where the file's name does not say so."""

DATASET = Dataset(
    name="GSM8K",
    files=(
        Layout(("test.jsonl",), _SIGNS),
        Layout(("test.parquet",), _SIGNS),
        Layout(("main/test-00000-of-00001.parquet",), _SIGNS),
        "gsm8k.jsonl",
        "gsm8k.parquet",
        "grade_school_math/data/test.jsonl",
        "gsm8k.json",
        "GSM8K.jsonl",
        "gsm8k_test.jsonl",
        Layout(("main/test-*-of-*.parquet",), _SIGNS),
        Layout(("main/test/*.parquet",), _SIGNS),
        Layout(("data/test.jsonl",), _SIGNS),
    ),
    folder="gsm8k",
    folders=("GSM8K", "grade-school-math", "grade-school-math-master"),
    hub="openai/gsm8k",
    revision="cc7b047b6e5bb11b4f1af84efc572db110a51b3c",
    config="main",
    split="test",
    fields=("question", "answer"),
    documents=1319,
)

PROMPTS: dict[str, Callable[[str], str]] = {
    "gsm8k": prompts.boxed,
    "gsm8k_cot8": prompts.chain_of_thought,
}
"""Task to what makes a prompt of a question. That of gsm8k_cot8_train is made with the examples that are drawn."""


def prepare(request: SuiteRequest) -> PreparedSuite:
    """Make the tasks of a request ready; see evictbench.suite.spec.Suite for what may be raised."""
    names = task_names(request, "GSM8K", TASKS, PROTOCOLS["default"].tasks)
    loaded = load(DATASET, request.data_dir)
    where = place(loaded.origin, request.data_dir)
    missing = incomplete(DATASET, loaded, request.limit)
    problems = [
        {"question": record["question"], "answer": _gold(record["answer"], f"{where}: record {row}")}
        for row, record in enumerate(loaded.records, start=1)
    ]
    renders = dict(PROMPTS)
    data = {loaded.origin: f"sha256:{loaded.sha256}"}
    warnings = [missing] if missing else []
    if FROM_TRAIN in names:
        drawn = exemplars.draw(request.data_dir)
        renders[FROM_TRAIN] = partial(prompts.after, drawn.text)
        data |= drawn.data
        warnings += drawn.warnings
    return PreparedSuite(
        tasks=names,
        metadata={"gsm8k_documents": {name: _documents(renders[name], problems) for name in names}},
        data=data,
        warnings=tuple(warnings),
    )


def documents(task: str, gsm8k_documents: dict[str, Documents] | None = None, **_: object) -> dict[str, Documents]:
    """lm-eval `custom_dataset` of every task: the documents that `prepare` put into the metadata."""
    return prepared_documents(task, gsm8k_documents)


def _documents(prompt: Callable[[str], str], problems: list[Record]) -> Documents:
    def make(index: int, problem: Record) -> Record:
        return {"index": index, "input": prompt(problem["question"]), "gen_prefix": "", **problem}

    return Documents(problems, make)


def _gold(answer: object, where: str) -> str:
    """The number after #### in a worked solution, or an answer that is a number itself. UserError for any other."""
    value = number(str(answer).rpartition("####")[2].strip())
    if value is None:
        raise UserError(f"{where}: the answer does not end with #### and a number.")
    return spelled(value)
