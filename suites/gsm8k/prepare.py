"""Where the problems come from, and the documents of both prompts."""

from __future__ import annotations

from collections.abc import Callable

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Dataset, Documents, Record, load

from . import prompts
from .numbers import number, spelled

DATASET = Dataset(
    name="GSM8K",
    files=(
        "test.jsonl",
        "test.parquet",
        "main/test-00000-of-00001.parquet",
        "gsm8k.jsonl",
        "gsm8k.parquet",
    ),
    folder="gsm8k",
    hub="openai/gsm8k",
    revision="cc7b047b6e5bb11b4f1af84efc572db110a51b3c",
    config="main",
    split="test",
    fields=("question", "answer"),
)

PROMPTS: dict[str, Callable[[str], str]] = {
    "gsm8k": prompts.boxed,
    "gsm8k_cot8": prompts.chain_of_thought,
}


def prepare(request: SuiteRequest) -> PreparedSuite:
    """Make the tasks of a request ready; see evictbench.suite.spec.Suite for what may be raised."""
    from . import SUITE

    names = tuple(dict.fromkeys(request.tasks or SUITE.protocols["default"].tasks))
    for name in names:
        if name not in PROMPTS:
            raise UserError(f"GSM8K has no task {name!r}; there are {', '.join(PROMPTS)}.")
    loaded = load(DATASET, request.data_dir)
    where = str(request.data_dir / loaded.origin) if request.data_dir else loaded.origin
    problems = [
        {"question": record["question"], "answer": _gold(record["answer"], f"{where}: record {row}")}
        for row, record in enumerate(loaded.records, start=1)
    ]
    return PreparedSuite(
        tasks=names,
        metadata={"gsm8k_documents": {name: _documents(PROMPTS[name], problems) for name in names}},
        data={loaded.origin: f"sha256:{loaded.sha256}"},
    )


def documents(task: str, gsm8k_documents: dict[str, Documents] | None = None, **_: object) -> dict[str, Documents]:
    """lm-eval `custom_dataset` of both tasks: what `prepare` put into the metadata."""
    if not gsm8k_documents or task not in gsm8k_documents:
        raise UserError(f"{task} was not prepared: hand the metadata of SUITE.prepare(...) to TaskManager.")
    return {"test": gsm8k_documents[task]}


def _documents(prompt: Callable[[str], str], problems: list[Record]) -> Documents:
    def make(index: int, problem: Record) -> Record:
        return {"index": index, "input": prompt(problem["question"]), "gen_prefix": "", "answer": problem["answer"]}

    return Documents(problems, make)


def _gold(answer: object, where: str) -> str:
    """The number after #### in a worked solution; an answer that is a number already stands for itself."""
    value = number(str(answer).rpartition("####")[2].strip())
    if value is None:
        raise UserError(f"{where}: the answer does not end with #### and a number.")
    return spelled(value)
