"""Problems with one answer each, as the copies on the hub spell them. For suites of boxed answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Dataset, Loaded, Record, Unavailable, load

from .boxed import prompt

PROBLEM = ("problem", "question", "Problem", "Question")
ANSWER = ("answer", "Answer")

Document = dict[str, Any]
Read = Callable[[str, str], Any]  # an answer as the file has it, and where it stands, to the document's gold


def prepare(
    request: SuiteRequest,
    *,
    suite: str,
    datasets: Mapping[str, Dataset],
    default: Iterable[str],
    gold: Read,
    versions: Mapping[str, str] | None = None,
) -> PreparedSuite:
    """Make the tasks of `request` ready: documents of `index`, `input`, `answer`, in the order of their file.

    datasets: one per task. gold: checks an answer of the file and returns what the grader compares with.
    versions: what else goes into the result's data. The documents go to lm-eval as the metadata `<suite>_problems`.
    Raises UserError for a task that there is not, and for data that is broken, or not there when asked for by name.
    """
    names = tuple(dict.fromkeys(request.tasks or default))
    for name in names:
        if name not in datasets:
            raise UserError(f"{suite} has no task {name!r}; there are {', '.join(datasets)}.")
    problems: dict[str, list[Document]] = {}
    skipped: dict[str, str] = {}
    data: dict[str, str] = {}
    for name in names:
        try:
            loaded = load(datasets[name], request.data_dir)
        except Unavailable as error:
            if (request.tasks and request.named) or len(names) == 1:
                raise
            skipped[name] = str(error)
            continue
        problems[name] = _documents(loaded, str(request.data_dir / loaded.origin) if request.data_dir else "", gold)
        data[loaded.origin] = f"sha256:{loaded.sha256}"
    if not problems:
        raise UserError(f"No task of {suite} can run: {' '.join(skipped.values())}")
    return PreparedSuite(
        tasks=tuple(problems),
        metadata={f"{suite}_problems": problems},
        skipped=skipped,
        data={**data, **(versions or {})},
    )


def dataset(task: str, problems: Mapping[str, list[Document]] | None) -> dict[str, Any]:
    """lm-eval `custom_dataset` of a task, from what `prepare` put into the metadata."""
    if not problems or task not in problems:
        raise UserError(f"{task} was not prepared: hand the metadata of SUITE.prepare(...) to TaskManager.")
    from datasets import Dataset as Rows

    return {"test": Rows.from_list(problems[task])}


def _documents(loaded: Loaded, path: str, gold: Read) -> list[Document]:
    documents = []
    for row, record in enumerate(loaded.records, start=1):
        where = f"{path or loaded.origin}: record {row}"
        problem = _field(record, PROBLEM, where)
        answer = gold(_field(record, ANSWER, where), where)
        documents.append({"index": row - 1, "input": prompt(problem), "answer": answer})
    return documents


def _field(record: Record, spellings: tuple[str, ...], where: str) -> str:
    for name in spellings:
        value = record.get(name)
        if value is not None and str(value).strip():
            return str(value)
    raise UserError(f"{where} has no {spellings[0]} (a field {', '.join(spellings[:-1])} or {spellings[-1]}).")
