"""The questions and prompts of every task, made into documents."""

from __future__ import annotations

from typing import Any

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Dataset, Documents, Loaded, Record, incomplete, load
from evictbench.suite.tasks import prepare_each, prepared_documents, task_names

from .prompts import Shots, shots
from .tasks import COT, DIRECT, DOCUMENTS, SUBJECT_OF, SUBJECTS, TRUTHS


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
        if missing := incomplete(DATASETS[subject], loaded, request.limit):
            warnings[missing] = None
        data[loaded.origin if request.data_dir else f"{loaded.origin} {subject}"] = f"sha256:{loaded.sha256}"
        data[f"cot-prompts/{subject}"] = f"sha256:{prompt.sha256}"
        where = str(request.data_dir / loaded.origin) if request.data_dir else f"{loaded.origin} {subject}"
        return _documents(subject, loaded.records, where, prompt, direct=name in DIRECT)

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


def target_text(target: Any, subject: str) -> str | None:
    """A record's target as text: a number or a truth value is one where the file's format has such (8, `false`). None
    for what is no answer of the subject."""
    if isinstance(target, bool):
        return TRUTHS[subject][not target] if subject in TRUTHS else None
    if isinstance(target, (int, float)):
        return str(int(target)) if target == target // 1 else None
    return target if isinstance(target, str) and target.strip() else None


def _documents(subject: str, records: list[Record], where: str, prompt: Shots, direct: bool) -> Documents:
    """direct: examples that give their answers only, in place of chains of thought. Raises UserError for a target that
    is no text, number or truth value, and for an input that is no text."""
    targets = [target_text(record["target"], subject) for record in records]
    for row, (record, target) in enumerate(zip(records, targets, strict=True), start=1):
        if target is None:
            raise UserError(f"{where}: the target of record {row}, {record['target']!r}, is no answer of {subject}.")
        if not isinstance(record["input"], str):
            raise UserError(f"{where}: the input of record {row} is no text.")
    render = prompt.direct if direct else prompt.chain_of_thought

    def make(index: int, record: Record) -> Record:
        return {"index": index, "input": render(record["input"]), "gen_prefix": "", "target": targets[index]}

    return Documents(records, make)
