"""Where the questions come from, and the documents of every task."""

from __future__ import annotations

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Dataset, Documents, Loaded, Record, Unavailable, load

from .prompts import Shots, shots
from .tasks import COT, DIRECT, SUBJECTS


def dataset(subject: str) -> Dataset:
    """Where the questions of one task are."""
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
    from . import SUITE

    names = tuple(dict.fromkeys(request.tasks or SUITE.protocols["default"].tasks))
    made: dict[str, Documents] = {}
    skipped: dict[str, str] = {}
    data: dict[str, str] = {}
    read: dict[str, tuple[Loaded, Shots]] = {}
    for name in names:
        subject = _subject(name)
        try:
            if subject not in read:
                read[subject] = load(DATASETS[subject], request.data_dir), shots(subject, request.data_dir)
        except Unavailable as error:
            if request.tasks and request.named:
                raise
            skipped[name] = str(error)
            continue
        loaded, prompt = read[subject]
        made[name] = _documents(loaded.records, prompt, direct=name in DIRECT)
        data[loaded.origin if request.data_dir else f"{loaded.origin} {subject}"] = f"sha256:{loaded.sha256}"
        data[f"cot-prompts/{subject}"] = f"sha256:{prompt.sha256}"
    if not made:
        raise UserError(f"No task of BBH can run: {next(iter(skipped.values()))}")
    return PreparedSuite(tasks=tuple(made), metadata={"bbh_documents": made}, skipped=skipped, data=data)


def documents(task: str, bbh_documents: dict[str, Documents] | None = None, **_: object) -> dict[str, Documents]:
    """lm-eval `custom_dataset` of every task: what `prepare` put into the metadata."""
    if not bbh_documents or task not in bbh_documents:
        raise UserError(f"{task} was not prepared: hand the metadata of SUITE.prepare(...) to TaskManager.")
    return {"test": bbh_documents[task]}


def _subject(name: str) -> str:
    subject = COT.get(name) or DIRECT.get(name)
    if subject is None:
        raise UserError(
            f"BBH has no task {name!r}; there are bbh_<task> and bbh_<task>_direct for {', '.join(SUBJECTS)}."
        )
    return subject


def _documents(records: list[Record], prompt: Shots, direct: bool) -> Documents:
    render = prompt.direct if direct else prompt.chain_of_thought

    def make(index: int, record: Record) -> Record:
        return {"index": index, "input": render(record["input"]), "gen_prefix": "", "target": record["target"]}

    return Documents(records, make)
