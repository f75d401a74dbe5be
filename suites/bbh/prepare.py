"""The questions and prompts of every task, made into documents."""

from __future__ import annotations

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Dataset, Documents, Loaded, Record, incomplete, load, place
from evictbench.suite.tasks import prepare_each, prepared_documents, task_names

from .prompts import Shots, shots
from .tasks import COT, DIRECT, DOCUMENTS, SUBJECT_OF, SUBJECTS


def dataset(subject: str) -> Dataset:
    """Where the questions of one task are found."""
    names = [f"{subject}{kind}" for kind in (".json", ".jsonl", ".parquet")]
    parts = (f"{subject}/test-*-of-*.parquet", f"{subject}/test/*.parquet")
    return Dataset(
        name=f"BBH {subject}",
        files=(*names, *(f"bbh/{name}" for name in names), *parts),
        folder="bbh",
        folders=("BBH", "BIG-Bench-Hard", "BIG-Bench-Hard-main"),
        repositories=("lukaemon/bbh",),
        documents=DOCUMENTS.get(subject, 250),
        hub="SaylorTwift/bbh",
        revision=None,
        config=subject,
        split="test",
        fields=("input", "target"),
    )


DATASETS = {subject: dataset(subject) for subject in SUBJECTS}


def prepare(request: SuiteRequest) -> PreparedSuite:
    """Make the tasks of a request ready; see evictbench.suite.spec.Suite for what may be raised."""
    data: dict[str, str] = {}
    warnings: dict[str, None] = {}
    read: dict[str, tuple[Loaded, Shots]] = {}

    def prepare_task(name: str) -> Documents:
        subject = SUBJECT_OF[name]
        if subject not in read:
            read[subject] = load(DATASETS[subject], request.data_dir), shots(subject, request.data_dir)
        loaded, prompt = read[subject]
        _check_texts(loaded, request)
        if missing := incomplete(DATASETS[subject], loaded, request.limit):
            warnings[missing] = None
        data[loaded.origin if request.data_dir else f"{loaded.origin} {subject}"] = f"sha256:{loaded.sha256}"
        data[f"cot-prompts/{subject}"] = f"sha256:{prompt.sha256}"
        return _documents(loaded.records, prompt, direct=name in DIRECT)

    names = task_names(request, "BBH", SUBJECT_OF, COT)
    prepared, skipped = prepare_each(request, "BBH", names, prepare_task)
    return PreparedSuite(
        tasks=tuple(prepared),
        metadata={"bbh_documents": prepared},
        skipped=skipped,
        data=data,
        warnings=tuple(warnings),
    )


def documents(task: str, bbh_documents: dict[str, Documents] | None = None, **_: object) -> dict[str, Documents]:
    """lm-eval `custom_dataset` of every task: the documents that `prepare` put into the metadata."""
    return prepared_documents(task, bbh_documents)


def _check_texts(loaded: Loaded, request: SuiteRequest) -> None:
    """Raise UserError for a question or a target that is no text: a converted file may hold false for "False"."""
    for number, record in enumerate(loaded.records, start=1):
        for field in ("input", "target"):
            if not isinstance(record[field], str):
                where = f"{place(loaded.origin, request.data_dir)}: record {number}"
                raise UserError(f"{where}: the field {field!r} is {record[field]!r}, and not a text in quotes.")


def _documents(records: list[Record], prompt: Shots, direct: bool) -> Documents:
    """direct: examples that give their answers only, in place of chains of thought."""
    render = prompt.direct if direct else prompt.chain_of_thought

    def make(index: int, record: Record) -> Record:
        return {"index": index, "input": render(record["input"]), "gen_prefix": "", "target": record["target"]}

    return Documents(records, make)
