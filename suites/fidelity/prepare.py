"""From a request to texts: a prompt and the token ids of its continuation, packed to the context asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Documents, Record, Unavailable

from .fit import Encoder
from .sources import Found, Room, gsm8k, longbench, ruler, text

CARD_TOKENS = 256
"""Tokens of a continuation, unless --max-new-tokens says else (the task files carry it too)."""

LEAST_CONTEXT = 64

SOURCES: dict[str, Callable[[SuiteRequest, Encoder, Room, int], Found]] = {
    "gsm8k": gsm8k,
    "longbench": longbench,
    "ruler": ruler,
    "text": text,
}


def prepare(request: SuiteRequest) -> PreparedSuite:
    """Make the tasks of a request ready; see evictbench.suite.spec.Suite for what may be raised."""
    from . import SUITE

    context = request.context or SUITE.default_context or 0
    limit = request.limit or SUITE.default_limit or 0
    if context < LEAST_CONTEXT:
        raise UserError(f"Fidelity needs a context of at least {LEAST_CONTEXT} tokens, not {context}.")
    if limit < 1:
        raise UserError(f"The number of texts must be at least 1, not {limit}.")
    encoder = Encoder(request.tokenizer)
    continuation = min(request.max_new_tokens or CARD_TOKENS, context // 2)
    room = Room(context - encoder.around, continuation)
    documents: dict[str, Sequence[Record]] = {}
    skipped: dict[str, str] = {}
    data: dict[str, str] = {}
    for name in request.tasks or SUITE.tasks:
        try:
            found = SOURCES[name](request, encoder, room, limit)
        except Unavailable as error:
            if request.tasks and request.named:
                raise
            skipped[name] = str(error)
            continue
        documents[name] = Documents(found.texts, lambda index, record: record | {"index": index})
        data |= found.data
    if not documents:
        raise UserError(f"No task of fidelity can be run. {' '.join(skipped.values())}")
    return PreparedSuite(tasks=tuple(documents), metadata={"fidelity_texts": documents}, skipped=skipped, data=data)


def documents(task: str, fidelity_texts: Mapping[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    """lm-eval `custom_dataset` of every task: what `prepare` put into the metadata."""
    if not fidelity_texts or task not in fidelity_texts:
        raise UserError(f"{task} was not prepared: hand the metadata of SUITE.prepare(...) to TaskManager.")
    return {"test": fidelity_texts[task]}


def no_text(doc: Mapping[str, Any], results: Sequence[str]) -> NoReturn:
    """lm-eval `process_results`: there is no answer to grade."""
    raise RuntimeError("fidelity is measured by the suite's own generator; no text of it is graded")
