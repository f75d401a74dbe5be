"""Making the texts of a request: each is a prompt and the token ids of its continuation, packed to the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Documents
from evictbench.suite.tasks import prepare_each, prepared_documents, task_names

from .fit import Encoder
from .sources import Room, Texts, gsm8k, longbench, ruler, text
from .tasks import CARD_TOKENS, DEFAULT_CONTEXT, DEFAULT_LIMIT, LEAST_CONTEXT, TASKS

SOURCES: dict[str, Callable[[SuiteRequest, Encoder, Room, int], Texts]] = {
    "gsm8k": gsm8k,
    "longbench": longbench,
    "ruler": ruler,
    "text": text,
}
"""Task to what makes its texts."""


def prepare(request: SuiteRequest) -> PreparedSuite:
    """Make the tasks of a request ready; see evictbench.suite.spec.Suite for what may be raised."""
    context = request.context or DEFAULT_CONTEXT
    limit = request.limit or DEFAULT_LIMIT
    if context < LEAST_CONTEXT:
        raise UserError(f"Fidelity needs a context of at least {LEAST_CONTEXT} tokens, not {context}.")
    if limit < 1:
        raise UserError(f"The number of texts must be at least 1, not {limit}.")
    encoder = Encoder(request.tokenizer)
    continuation = min(request.max_new_tokens or CARD_TOKENS, context // 2)
    room = Room(context - encoder.around, continuation)
    data: dict[str, str] = {}

    def prepare_task(name: str) -> Documents:
        texts = SOURCES[name](request, encoder, room, limit)
        data.update(texts.data)
        return Documents(texts.records, lambda index, record: record | {"index": index})

    names = task_names(request, "fidelity", TASKS, TASKS)
    prepared, skipped = prepare_each(request, "fidelity", names, prepare_task)
    return PreparedSuite(tasks=tuple(prepared), metadata={"fidelity_texts": prepared}, skipped=skipped, data=data)


def documents(task: str, fidelity_texts: Mapping[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    """lm-eval `custom_dataset` of every task: the texts that `prepare` put into the metadata."""
    return prepared_documents(task, fidelity_texts)


def no_text(doc: Mapping[str, Any], results: Sequence[str]) -> NoReturn:
    """lm-eval `process_results`, which is never called: there is no answer to grade."""
    raise RuntimeError("fidelity is measured by the suite's own generator; no text of it is graded")
