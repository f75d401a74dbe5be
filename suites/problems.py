"""Problems with one answer each, under the field names that the hub's copies use. For suites of boxed answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Dataset, Loaded, Record, incomplete, load, place
from evictbench.suite.tasks import prepare_each, prepared_documents, task_names

from .boxed import prompt

PROBLEM = ("problem", "question", "Problem", "Question")
ANSWER = ("answer", "Answer")
"""Names that the fields have in one copy or another."""

Document = dict[str, Any]

ReadGold = Callable[[str, str], Any]
"""Makes a document's gold answer from the answer in the file and the place where it stands, for sentences."""


def prepare(
    request: SuiteRequest,
    *,
    suite: str,
    datasets: Mapping[str, Dataset],
    gold: ReadGold,
    versions: Mapping[str, str] | None = None,
) -> PreparedSuite:
    """Make the tasks of `request` ready. Documents have `index`, `input` and `answer`, in the order of their file.

    datasets: one for each task of the suite. gold: checks an answer of the file and returns what the grader compares
    with. versions: further entries of the result's data. The documents go to lm-eval as metadata `<suite>_problems`.
    Raises UserError for an unknown task, for broken data, and for missing data of a task that the user named.
    """
    data: dict[str, str] = {}
    warnings: list[str] = []

    def prepare_task(name: str) -> list[Document]:
        loaded = load(datasets[name], request.data_dir)
        data[loaded.origin] = f"sha256:{loaded.sha256}"
        if missing := incomplete(datasets[name], loaded, request.limit):
            warnings.append(missing)
        return _documents(loaded, place(loaded.origin, request.data_dir), gold)

    problems, skipped = prepare_each(request, suite, task_names(request, suite, datasets, datasets), prepare_task)
    return PreparedSuite(
        tasks=tuple(problems),
        metadata={f"{suite}_problems": problems},
        skipped=skipped,
        data={**data, **(versions or {})},
        warnings=tuple(warnings),
    )


def dataset(task: str, problems: Mapping[str, list[Document]] | None) -> dict[str, Any]:
    """lm-eval `custom_dataset` of a task, from what `prepare` put into the metadata."""
    from datasets import Dataset as Rows

    return {split: Rows.from_list(documents) for split, documents in prepared_documents(task, problems).items()}


def _documents(loaded: Loaded, source: str, gold: ReadGold) -> list[Document]:
    """source: where the records are from, for sentences."""
    documents = []
    for row, record in enumerate(loaded.records, start=1):
        where = f"{source}: record {row}"
        problem = _field(record, PROBLEM, where)
        answer = gold(_field(record, ANSWER, where), where)
        documents.append({"index": row - 1, "input": prompt(problem), "answer": answer})
    return documents


def _field(record: Record, spellings: tuple[str, ...], where: str) -> str:
    """The text, or the number as text, of the first field that is there. Raises UserError if none is, and for what is
    neither."""
    for name in spellings:
        value = record.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise UserError(f"{where}: the field {name} holds {value!r}, and has to hold a text or a number.")
        if str(value).strip():
            return str(value)
    raise UserError(f"{where} has no {spellings[0]} (a field {', '.join(spellings[:-1])} or {spellings[-1]}).")
