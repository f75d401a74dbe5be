"""A suite's lm-eval tasks without lm-eval's evaluator: documents become prompts of token ids, completions scores.

Text is encoded once. A prompt has at most one BOS, at its start: a chat template brings its own, and only plain text
gets what the tokenizer puts in front of text.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench import yaml_file
from evictbench.errors import UserError
from evictbench.evaluation.thinking import Thinking
from evictbench.suite.spec import PreparedSuite, Suite

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerBase

METRIC, ANSWER = "score", "answer"
"""The keys of a task's own grading that a run reads: its main metric, and the answer found in the text."""

ENCODED_TOGETHER = 16
"""Prompts encoded at a time, over all cores."""

CHAT_DAY = date(2024, 7, 26)
"""The date that chat templates are told, so that a prompt is the same every day."""

FEWSHOT_SEED = 1234
"""lm-eval's own default for drawing examples, where a task has any."""

UNSTATED_LIMIT = 256
"""lm-eval's own token limit for tasks that state none."""

NO_THOUGHT = Thinking()


@dataclass(frozen=True)
class Prompt:
    """One document as the model will read it.

    ids: token ids of the whole prompt. border: index of the first question token, None where the question is seen.
    max_new_tokens: the task card's limit. stop: strings that end an answer. thinking: whether the answer may begin with
    a thought.
    """

    task: str
    doc_id: int
    ids: array[int]
    border: int | None
    max_new_tokens: int
    stop: tuple[str, ...]
    thinking: Thinking = NO_THOUGHT


@dataclass(frozen=True)
class GradedAnswer:
    """How a task grades a completion.

    score: in [0, 1]. metrics: every metric of the task by name. answer: the answer found in the text, "" for none;
    None where the task does not say it.
    """

    score: float
    metrics: dict[str, float]
    answer: str | None = None


def load_tasks(suite: Suite, prepared: PreparedSuite) -> dict[str, ConfigurableTask]:
    """The lm-eval tasks of a prepared suite, in its order. Their documents are made here.

    Raises UserError for a task file in which a key is given twice.
    """
    manager = task_manager(include_path=str(suite.folder), include_defaults=False, metadata=dict(prepared.metadata))
    check_task_files(manager, prepared.tasks)
    loaded = manager.load(list(prepared.tasks))["tasks"]
    for task in loaded.values():
        task.set_fewshot_seed(FEWSHOT_SEED)
    return {name: loaded[name] for name in prepared.tasks}


def task_manager(**options: Any) -> TaskManager:
    """lm-eval's TaskManager with these options, silenced: its hints are for users of its own command line."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return TaskManager(**options)


def check_task_files(manager: TaskManager, names: Iterable[str]) -> None:
    """Raise UserError for a task file, or a file that it includes, in which a key is given twice."""
    left = [entry.yaml_path for name in names if (entry := manager.task_index.get(name)) and entry.yaml_path]
    checked: set[Path] = set()
    while left:
        file = left.pop()
        if file not in checked and file.is_file():
            checked.add(file)
            if included := yaml_file.check_keys(file).get("include"):
                left.append(file.parent / included)


def version_of(task: ConfigurableTask) -> str:
    """The version in the task's YAML metadata."""
    return str(task.VERSION)


def uses_chat(task: ConfigurableTask) -> bool:
    """Whether the task may be put into a chat template; `chat: false` in its YAML metadata rules it out."""
    return (task.config.metadata or {}).get("chat") is not False


def token_limit(task: ConfigurableTask) -> int:
    """The number of tokens that the task's card allows an answer."""
    return int((task.config.generation_kwargs or {}).get("max_gen_toks", UNSTATED_LIMIT))


def prompts(
    task: ConfigurableTask,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool,
    context_field: str | None,
    limit: int | None,
    thinking: Thinking = NO_THOUGHT,
) -> Iterator[Prompt]:
    """Render and encode a task's first `limit` documents, in the chat template if the task allows it.

    context_field: the document field at whose end the question begins; None where the question is seen.
    thinking: how the chat template treats thoughts.
    """
    stop = tuple(text for text in _listed((task.config.generation_kwargs or {}).get("until")) if text)
    if not uses_chat(task):
        chat = False
    if not chat:
        thinking = NO_THOUGHT
    prefix = () if chat else _text_prefix(tokenizer)
    documents = enumerate(islice(task.task_docs, limit))
    while batch := list(islice(documents, ENCODED_TOGETHER)):
        texts = [render(task, doc, tokenizer if chat else None, thinking.on) for _, doc in batch]
        ends = None
        if context_field is not None:
            ends = [
                _context_end(text, task.doc_to_text(doc), doc[context_field], task.task_name, doc_id)
                for text, (doc_id, doc) in zip(texts, batch, strict=True)
            ]
        for (doc_id, _), (ids, border) in zip(batch, encode(texts, tokenizer, prefix, ends), strict=True):
            yield Prompt(task.task_name, doc_id, array("I", ids), border, token_limit(task), stop, thinking)


def render(
    task: ConfigurableTask,
    doc: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    thinking: bool = False,
) -> str:
    """The whole prompt as text; in the chat template of `tokenizer`, if one is given.

    The answer prefix follows the assistant's header unchanged. (A template that were given it as an unfinished
    assistant turn might strip it, or put an empty thought before it.) With `thinking` there is no answer prefix.
    """

    def in_template(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        assert tokenizer is not None
        answer = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        turns = messages[:-1] if answer else messages
        header = tokenizer.apply_chat_template(
            turns, chat_template=_on_chat_day(tokenizer), tokenize=False, add_generation_prompt=True
        )
        return str(header) + answer

    context = task.fewshot_context(
        doc,
        num_fewshot=task.config.num_fewshot or 0,
        apply_chat_template=tokenizer is not None,
        fewshot_as_multiturn=True,
        chat_template=in_template if tokenizer is not None else None,
        gen_prefix=None if thinking else task.doc_to_prefix(doc) or None,
    )
    request = task.construct_requests(doc, context, metadata=(task.task_name, 0, 1))
    return str(request.arguments[0])


def encode(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    prefix: Sequence[int] = (),
    context_ends: Sequence[int] | None = None,
) -> Iterator[tuple[list[int], int | None]]:
    """Encode prompts: for each, its token ids and its border, the index of the first question token.

    prefix: ids to put in front, unless a text begins with them already. context_ends: for each text the character at
    which its context ends; None for prompts without a border.
    The border is the first token that begins at or after the end of the context: a token that holds the end of the
    context and the beginning of the question counts as context. (A byte-level tokenizer may leave the blanks before a
    word out of its offset; at worst that makes a blank at the context's end part of the question.)
    Raises UserError for a tokenizer that does not give offsets where a border is wanted.
    """
    if context_ends is not None and not tokenizer.is_fast:
        raise UserError(
            "This model's tokenizer does not say where its tokens lie in the text, so the border before the question "
            "cannot be found: use --question seen."
        )
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=context_ends is not None)
    for index, ids in enumerate(encoded["input_ids"]):
        front = [] if list(ids[: len(prefix)]) == list(prefix) else list(prefix)
        border = None
        if context_ends is not None:
            starts = (start for start, _ in encoded["offset_mapping"][index])
            border = next((i for i, start in enumerate(starts, len(front)) if start >= context_ends[index]), None)
        yield [*front, *ids], border


def score(task: ConfigurableTask, doc_id: int, text: str) -> GradedAnswer:
    """Filter and grade one completion as the task does.

    Raises RuntimeError for a task whose main metric is missing or not in [0, 1].
    """
    from lm_eval.api.instance import Instance

    doc = task.task_docs[doc_id]
    instance = Instance("generate_until", doc, ("",), 0, (task.task_name, doc_id, 1), [text])
    metrics: dict[str, float] = {}
    answer: str | None = None
    for pipeline in task._filters:
        pipeline.apply([instance])
        for name, value in task.process_results(doc, [instance.filtered_resps[pipeline.name]]).items():
            if name == ANSWER:
                answer = str(value) if answer is None else answer
            else:
                metrics.setdefault(name, float(value))
    if METRIC not in metrics or not 0 <= metrics[METRIC] <= 1:
        raise RuntimeError(f"the task {task.task_name} gave no {METRIC} between 0 and 1 but {metrics}")
    return GradedAnswer(metrics[METRIC], metrics, answer)


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer brings a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def _on_chat_day(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template, its clock set to CHAT_DAY. (Templates take data from outside, no functions.)"""
    template = str(tokenizer.get_chat_template())
    if "strftime_now" not in template:
        return template
    codes = [f"%{code}" for code in ("-d", "-m", *"aAbBdHIjmMpSyY")]
    replaced = "".join(f"|replace('{code}', '{CHAT_DAY.strftime(code)}')" for code in codes)
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{replaced} }}}}{{%- endmacro -%}}{template}"


def _text_prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that the tokenizer puts in front of plain text: its BOS, or none. (`add_bos_token` is no sure sign.)"""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()


def _context_end(text: str, user_text: str, context: str, task: str, doc_id: int) -> int:
    """The character at which the context ends in the rendered prompt, whose template may strip the user's turn.

    Raises RuntimeError where the context does not stand in the prompt as it is.
    """
    context_start = user_text.find(context)
    blanks = len(user_text) - len(user_text.lstrip())
    for turn, cut in ((user_text, 0), (user_text.strip(), blanks)):
        start = text.rfind(turn)
        if context_start >= 0 and start >= 0:
            return start + min(max(context_start + len(context) - cut, 0), len(turn))
    raise RuntimeError(f"the context of {task}, sample {doc_id}, is not in its prompt as it stands in the document")


def _listed(value: Any) -> list[str]:
    """A list from None, a string or a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)
