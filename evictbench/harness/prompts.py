"""Documents of an lm-eval task as finished prompts, and its own grading of what came back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evictbench import hub
from evictbench.errors import UserError
from evictbench.harness.arguments import SCORED, encode_pair
from evictbench.suite.datasets import Documents
from evictbench.suite.spec import PreparedSuite, SuiteRequest

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Graded:
    """The task that a document is of, and its number there. Kept out of copies and of records."""

    task: ConfigurableTask
    doc_id: int

    def __deepcopy__(self, memo: object) -> Graded:
        return self


def documents(task: str, lm_eval_documents: Mapping[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    """lm-eval `custom_dataset` of the wrapper: what `prepare` put into the metadata."""
    if not lm_eval_documents or task not in lm_eval_documents:
        raise UserError(f"{task} was not prepared: hand the metadata of the suite's prepare(...) to TaskManager.")
    return {"test": lm_eval_documents[task]}


def grade(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """lm-eval `process_results` of the wrapper: the task's own filters and grading.

    results: one text, or the (log-probability, greedy) of each choice. Metrics of filters behind the first are named
    `metric,filter`. `score` is the first of them that is a mean over samples, higher being better.
    """
    from lm_eval.api.instance import Instance

    task, doc_id = doc["source"].task, doc["source"].doc_id
    own = task.task_docs[doc_id]
    metrics: dict[str, float] = {}
    for number, pipeline in enumerate(task._filters):
        instances = [Instance("graded", own, ("",), i, (task.task_name, doc_id, 1), [r]) for i, r in enumerate(results)]
        pipeline.apply(instances)
        found = task.process_results(own, [instance.filtered_resps[pipeline.name] for instance in instances])
        for name, value in found.items():
            if isinstance(value, bool | int | float) or hasattr(value, "dtype"):
                metrics.setdefault(name if number == 0 else f"{name},{pipeline.name}", float(value))
    for name in _means(task):
        if name in metrics and 0 <= metrics[name] <= 1:
            return {"score": metrics[name], **{key: value for key, value in metrics.items() if key != "score"}}
    raise RuntimeError(f"the lm-eval task {task.task_name} gave no metric between 0 and 1 but {metrics}")


def prepare(manager: TaskManager, names: Sequence[str], request: SuiteRequest) -> PreparedSuite:
    """The tasks' documents as finished prompts. Raises UserError for data that cannot be had and for tasks without a
    metric that is a mean."""
    from evictbench.evaluation import tasks, thinking

    if request.chat and thinking.default(request.tokenizer).on:
        raise UserError(
            "lm-eval's stop strings would end an answer inside its thought: use --thinking off, or --chat off, for "
            "an lm-eval task."
        )
    made: dict[str, Documents] = {}
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
        # One after the other: examples drawn for a prompt depend on those drawn before.
        finished = [_document(task, doc_id, request) for doc_id in range(count)]
        made[name] = Documents(finished, lambda index, doc: doc)
        config = task.config
        origin = " ".join(str(part) for part in (config.dataset_path, config.dataset_name) if part)
        data[f"{name} ({origin})"] = f"sha256:{_hash(task)}"
    return PreparedSuite(tasks=tuple(made), metadata={"lm_eval_documents": made}, data=data)


def _load(manager: TaskManager, name: str) -> ConfigurableTask:
    try:
        with _cache_alone_if_unreachable():
            return manager.load([name])["tasks"][name]
    except UserError:
        raise
    except Exception as error:  # the data set's libraries raise many kinds, none of them promised
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        config = manager.task_index[name].cfg or {}
        raise UserError(
            f"The lm-eval task {name} cannot be loaded ({reason}); lm-eval takes its data from "
            f"{config.get('dataset_path') or 'code of its own'}."
        ) from error


@contextmanager
def _cache_alone_if_unreachable() -> Iterator[None]:
    """`datasets` otherwise asks a hub that is out of reach again and again for half a minute."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or hub.why_unreachable() is not None
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _document(task: ConfigurableTask, doc_id: int, request: SuiteRequest) -> dict[str, Any]:
    """A finished prompt; for log-likelihood tasks, the ids of every context and continuation with it."""
    doc = task.task_docs[doc_id]
    chat = {
        "apply_chat_template": request.chat,
        "chat_template": _in_template(request.tokenizer) if request.chat else None,
    }
    context = task.fewshot_context(
        doc,
        num_fewshot=task.config.num_fewshot or 0,
        fewshot_as_multiturn=request.chat,
        gen_prefix=task.doc_to_prefix(doc) or None,
        **chat,
    )
    made = task.construct_requests(doc, context, metadata=(task.task_name, doc_id, 1), **chat)
    requests = made if isinstance(made, list) else [made]
    finished = {
        "index": doc_id,
        "input": str(requests[0].args[0]),
        "target": str(task.doc_to_target(doc)),
        "source": Graded(task, doc_id),
    }
    if task.OUTPUT_TYPE in SCORED:
        finished["texts"] = [str(one.args[1]) for one in requests]
        finished["choices"] = [_choice(task.task_name, doc_id, one.args, request) for one in requests]
    return finished


def _choice(name: str, doc_id: int, pair: Sequence[str], request: SuiteRequest) -> tuple[list[int], list[int]]:
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


def _in_template(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str]:
    def render(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    return render


def _means(task: ConfigurableTask) -> list[str]:
    """Metrics that are a mean over samples and better when higher, in the task's order."""
    from lm_eval.api.registry import get_aggregation

    mean, better = get_aggregation("mean"), task.higher_is_better()
    return [name for name, how in task.aggregation().items() if how is mean and better.get(name) is not False]


def _hash(task: ConfigurableTask) -> str:
    """sha256 of all the task's documents, however many are run."""
    whole = hashlib.sha256()
    for doc in task.task_docs:
        whole.update(json.dumps(doc, ensure_ascii=False, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
    return whole.hexdigest()
