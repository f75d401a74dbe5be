"""Steps that every suite takes to make its tasks ready: their names, tasks without data, documents for lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from evictbench.errors import UserError, unknown
from evictbench.suite.datasets import Unavailable
from evictbench.suite.spec import SuiteRequest

T = TypeVar("T")


def task_names(request: SuiteRequest, suite: str, known: Iterable[str], default: Iterable[str]) -> tuple[str, ...]:
    """The tasks that a request asks for, each once; those of `default` where it names none.

    Raises UserError for a task that is not among the `known` ones of the suite.
    """
    known = tuple(known)
    for name in request.tasks or ():
        if name not in known:
            raise unknown("task", name, known, f" of {suite}")
    return tuple(dict.fromkeys(request.tasks or default))


def prepare_each(
    request: SuiteRequest, suite: str, names: Sequence[str], prepare: Callable[[str], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Prepare every task by name. A task that is Unavailable is skipped, unless the user has named it.

    Returns task to what `prepare` has made of it, and skipped task to the sentence that says why.
    Raises UserError where no task is left.
    """
    prepared: dict[str, T] = {}
    skipped: dict[str, str] = {}
    for name in names:
        try:
            prepared[name] = prepare(name)
        except Unavailable as error:
            if (request.tasks and request.named) or len(names) == 1:
                raise
            skipped[name] = str(error)
    if not prepared:
        reasons = list(skipped.values())
        shown = reasons if len(reasons) <= 3 else [*reasons[:3], f"And {len(reasons) - 3} more."]
        raise UserError(f"No task of {suite} can run: {' '.join(shown)}")
    return prepared, skipped


def prepared_documents(task: str, prepared: Mapping[str, Any] | None) -> dict[str, Any]:
    """A task's split, as lm-eval's `custom_dataset` returns it. prepared: task to documents, from the metadata that the
    suite's `prepare` has made. Raises UserError where the task is not among them."""
    if not prepared or task not in prepared:
        raise UserError(f"{task} was not prepared: hand the metadata of the suite's prepare(...) to TaskManager.")
    return {"test": prepared[task]}
