"""The questions and prompts of every task, made into documents."""

from __future__ import annotations

from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Dataset, Documents, Loaded, Record, load
from evictbench.suite.tasks import prepare_each, prepared_documents, task_names

from .prompts import Shots, shots
from .tasks import COT, DIRECT, SUBJECT_OF, SUBJECTS


def dataset(subject: str) -> Dataset:
    """Where the questions of one task are found."""
    names = [f"{subject}{kind}" for kind in (".json", ".jsonl", ".parquet")]
    return Dataset(
        name=f"BBH {subject}",
        files=(*names, *(f"bbh/{name}" for name in names)),
        folder="bbh",
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
    read: dict[str, tuple[Loaded, Shots]] = {}

    def prepare_task(name: str) -> Documents:
        subject = SUBJECT_OF[name]
        if subject not in read:
            read[subject] = load(DATASETS[subject], request.data_dir), shots(subject, request.data_dir)
        loaded, prompt = read[subject]
        data[loaded.origin if request.data_dir else f"{loaded.origin} {subject}"] = f"sha256:{loaded.sha256}"
        data[f"cot-prompts/{subject}"] = f"sha256:{prompt.sha256}"
        return _documents(loaded.records, prompt, direct=name in DIRECT)

    names = task_names(request, "BBH", SUBJECT_OF, COT)
    prepared, skipped = prepare_each(request, "BBH", names, prepare_task)
    return PreparedSuite(tasks=tuple(prepared), metadata={"bbh_documents": prepared}, skipped=skipped, data=data)


def documents(task: str, bbh_documents: dict[str, Documents] | None = None, **_: object) -> dict[str, Documents]:
    """lm-eval `custom_dataset` of every task: the documents that `prepare` put into the metadata."""
    return prepared_documents(task, bbh_documents)


def _documents(records: list[Record], prompt: Shots, direct: bool) -> Documents:
    """direct: examples that give their answers only, in place of chains of thought."""
    render = prompt.direct if direct else prompt.chain_of_thought

    def make(index: int, record: Record) -> Record:
        return {"index": index, "input": render(record["input"]), "gen_prefix": "", "target": record["target"]}

    return Documents(records, make)
