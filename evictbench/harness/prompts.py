"""The documents of an lm-eval task as finished prompts, and the task's own grading of the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from evictbench import hub
from evictbench.errors import UserError, first_line
from evictbench.evaluation import tasks, thinking
from evictbench.harness.arguments import SCORED, encode_pair, render_chat
from evictbench.suite import chat_template
from evictbench.suite.datasets import Documents, hub_cache_only
from evictbench.suite.spec import PreparedSuite, SuiteRequest
from evictbench.suite.tasks import prepared_documents

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager


@dataclass(frozen=True)
class Source:
    """Where a document comes from: its task and its number there. A deep copy of it is itself."""

    task: ConfigurableTask
    doc_id: int

    def __deepcopy__(self, memo: object) -> Source:
        return self


def documents(task: str, lm_eval_documents: Mapping[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    """lm-eval `custom_dataset` of the wrapping task: the documents that `prepare` put into the metadata."""
    return prepared_documents(task, lm_eval_documents)


def grade(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """lm-eval `process_results` of the wrapping task: the lm-eval task's own filters and grading.

    results: one text, or the (log-probability, whether greedy) of each choice. The metrics of a second or later filter
    are named `metric,filter`. `score` is the first metric that is a mean over samples, better when higher.
    """
    from lm_eval.api.instance import Instance

    task, doc_id = doc["source"].task, doc["source"].doc_id
    own = task.task_docs[doc_id]
    metrics: dict[str, float] = {}
    for number, pipeline in enumerate(task._filters):
        instances = [Instance("graded", own, ("",), i, (task.task_name, doc_id, 1), [r]) for i, r in enumerate(results)]
        pipeline.apply(instances)
        graded = task.process_results(own, [instance.filtered_resps[pipeline.name] for instance in instances])
        for name, value in graded.items():
            if isinstance(value, bool | int | float) or hasattr(value, "dtype"):
                metrics.setdefault(name if number == 0 else f"{name},{pipeline.name}", float(value))
    for name in _means(task):
        if name in metrics and 0 <= metrics[name] <= 1:
            return {"score": metrics[name], **{key: value for key, value in metrics.items() if key != "score"}}
    raise RuntimeError(f"the lm-eval task {task.task_name} gave no metric between 0 and 1 but {metrics}")


def prepare(manager: TaskManager, names: Sequence[str], request: SuiteRequest) -> PreparedSuite:
    """The tasks' documents as finished prompts.

    Raises UserError for data that cannot be had, for tasks without a metric that is a mean, for prompts that open a
    thought, and for those that do not hold their document's text.
    """
    if request.chat and thinking.template_default(request.tokenizer).on:
        raise UserError(
            "lm-eval's stop strings would end an answer inside its thought: use --thinking off, or --chat off, for "
            "an lm-eval task."
        )
    prepared: dict[str, Documents] = {}
    data: dict[str, str] = {}
    for name in request.tasks or names:
        task = _load(manager, name)
        task.set_fewshot_seed(tasks.FEWSHOT_SEED)
        if not _means(task):
            raise UserError(
                f"The lm-eval task {name} has no metric that is a mean over samples ({', '.join(task.aggregation())}): "
                "run it with `evictbench-lm-eval --model evictbench`."
            )
        count = len(task.task_docs) if request.limit is None else min(request.limit, len(task.task_docs))
        # In order: the examples drawn for a prompt depend on those drawn before.
        finished = [_document(task, doc_id, request) for doc_id in range(count)]
        prepared[name] = Documents(finished, lambda index, doc: doc)
        config = task.config
        origin = " ".join(str(part) for part in (config.dataset_path, config.dataset_name) if part)
        data[f"{name} ({origin})"] = f"sha256:{_hash(task)}"
        if request.chat and config.description and not chat_template.takes_system(request.tokenizer):
            data[f"{name}, description"] = "in the first user's turn"  # the template has no system role
    return PreparedSuite(tasks=tuple(prepared), metadata={"lm_eval_documents": prepared}, data=data)


def _load(manager: TaskManager, name: str) -> ConfigurableTask:
    try:
        with hub_cache_only(hub.why_unreachable() is not None):
            return manager.load([name])["tasks"][name]
    except UserError:
        raise
    except Exception as error:  # the data set's libraries raise many kinds, none of them promised
        reason = first_line(error).rstrip(".")
        config = manager.task_index[name].cfg or {}
        raise UserError(
            f"The lm-eval task {name} cannot be loaded ({reason}); lm-eval takes its data from "
            f"{config.get('dataset_path') or 'code of its own'}."
        ) from error


def _document(task: ConfigurableTask, doc_id: int, request: SuiteRequest) -> dict[str, Any]:
    """A document with its finished prompt and, for log-likelihood tasks, the token ids of every choice."""
    doc, where = task.task_docs[doc_id], f"lm-eval's {task.task_name}, sample {doc_id}"
    chat = {
        "apply_chat_template": request.chat,
        "chat_template": partial(render_chat, request.tokenizer, where=where) if request.chat else None,
    }
    context = task.fewshot_context(
        doc,
        num_fewshot=task.config.num_fewshot or 0,
        fewshot_as_multiturn=request.chat,
        gen_prefix=task.doc_to_prefix(doc) or None,
        **chat,
    )
    constructed = task.construct_requests(doc, context, metadata=(task.task_name, doc_id, 1), **chat)
    requests = constructed if isinstance(constructed, list) else [constructed]
    asked = task.doc_to_text(doc)
    contexts = [str(each.args[0]) for each in requests if each.args[0]]  # an empty one has a sentence of its own
    if isinstance(asked, str) and not all(chat_template.holds(context, asked) for context in contexts):
        raise UserError(f"The prompt of {where} does not hold the text of its document, so it would not be asked.")
    finished = {
        "index": doc_id,
        "input": str(requests[0].args[0]),
        "target": str(task.doc_to_target(doc)),
        "source": Source(task, doc_id),
    }
    if task.OUTPUT_TYPE in SCORED:
        finished["texts"] = [str(choice.args[1]) for choice in requests]
        finished["choices"] = [_choice(task.task_name, doc_id, choice.args, request) for choice in requests]
    return finished


def _choice(name: str, doc_id: int, pair: Sequence[str], request: SuiteRequest) -> tuple[list[int], list[int]]:
    """Token ids of a choice's context and continuation. Raises UserError for a choice that cannot be scored."""
    if not pair[0]:
        raise UserError(
            f"{name}, sample {doc_id}, scores a continuation of an empty context, where there is nothing to evict "
            "from: such tasks are not offered under a policy."
        )
    context, continuation = encode_pair(request.tokenizer, pair[0], pair[1])
    total = len(context) + len(continuation)
    if not continuation:
        raise UserError(f"{name}, sample {doc_id}, has a choice without a token.")
    if request.window is not None and total > request.window:
        raise UserError(
            f"{name}, sample {doc_id}, has {total} tokens with a choice; the window holds {request.window}."
        )
    return context, continuation


def _means(task: ConfigurableTask) -> list[str]:
    """The task's metrics, in its order, that are a mean over samples and better when higher."""
    from lm_eval.api.registry import get_aggregation

    mean, better = get_aggregation("mean"), task.higher_is_better()
    return [
        name
        for name, aggregation in task.aggregation().items()
        if aggregation is mean and better.get(name) is not False
    ]


def _hash(task: ConfigurableTask) -> str:
    """sha256 of all documents of the task, however many are run."""
    whole = hashlib.sha256()
    for doc in task.task_docs:
        whole.update(json.dumps(doc, ensure_ascii=False, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
    return whole.hexdigest()
