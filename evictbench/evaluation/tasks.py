"""A suite's lm-eval tasks without lm-eval's evaluator: documents become prompts of token ids, completions scores.

Text is encoded once. A prompt has at most one BOS, at its start: a chat template brings its own, and only plain text
gets what the tokenizer puts in front of text.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench import yaml_file
from evictbench.errors import UserError
from evictbench.evaluation.thinking import Thinking
from evictbench.suite import chat_template
from evictbench.suite.spec import PreparedSuite, Suite

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerBase

METRIC, ANSWER = "score", "answer"
"""The keys of a task's own grading that a run reads: its main metric, and the answer found in the text."""

ENCODED_TOGETHER = 16
"""Prompts encoded at a time, over all cores."""

FEWSHOT_SEED = 1234
"""lm-eval's own default for drawing examples, where a task has any."""

UNSTATED_LIMIT = 256
"""lm-eval's own token limit for tasks that state none."""

NO_THOUGHT = Thinking()


@dataclass(frozen=True)
class Prompt:
    """One document as the model will read it.

    ids: token ids of the whole prompt. border: index of the first question token, None where the question is seen.
    max_new_tokens: the task card's limit. stop: strings that end an answer. ends: tokens that end it beside the
    model's. min_new_tokens: tokens that come before an end token can. thinking: whether the answer may begin with a
    thought.
    """

    task: str
    doc_id: int
    ids: array[int]
    border: int | None
    max_new_tokens: int
    stop: tuple[str, ...]
    thinking: Thinking = NO_THOUGHT
    ends: tuple[int, ...] = ()
    min_new_tokens: int = 0


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


def min_new_tokens(task: ConfigurableTask) -> int:
    """The number of tokens before an end token can come: `min_new_tokens` in the task's YAML metadata."""
    return int((task.config.metadata or {}).get("min_new_tokens", 0))


def end_tokens(task: ConfigurableTask, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end an answer beside the model's: the last token of each text in `ends` of the task's YAML metadata.

    A newline there is the token of a newline alone, and not, as a stop string, any token that holds one.
    """
    texts = _listed((task.config.metadata or {}).get("ends"))
    return tuple(tokenizer.encode(text, add_special_tokens=False)[-1] for text in texts)


def prompts(
    task: ConfigurableTask,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool,
    context_field: str | None,
    limit: int | None,
    thinking: Thinking = NO_THOUGHT,
    template: str = "The chat template",
    suite: str = "",
) -> Iterator[Prompt]:
    """Render and encode a task's first `limit` documents, in the chat template if the task allows it.

    context_field: the document field at whose end the question begins; None where the question is seen.
    thinking: how the chat template treats thoughts. template, suite: their names, for sentences.
    Raises UserError for a prompt that does not hold its document's text.
    """
    stop = tuple(text for text in _listed((task.config.generation_kwargs or {}).get("until")) if text)
    if not uses_chat(task):
        chat = False
    if not chat:
        thinking = NO_THOUGHT
    prefix = () if chat else _text_prefix(tokenizer)
    end_ids = end_tokens(task, tokenizer)
    documents = enumerate(islice(task.task_docs, limit))
    while batch := list(islice(documents, ENCODED_TOGETHER)):
        places = [f"{suite} {task.task_name}, sample {doc_id}".strip() for doc_id, _ in batch]
        texts = [
            render(task, doc, tokenizer if chat else None, thinking.on, template=template, where=where)
            for where, (_, doc) in zip(places, batch, strict=True)
        ]
        ends = None
        if context_field is not None:
            ends = [
                _context_end(text, task.doc_to_text(doc), doc[context_field], where)
                for text, where, (_, doc) in zip(texts, places, batch, strict=True)
            ]
        for (doc_id, _), (ids, border) in zip(batch, encode(texts, tokenizer, prefix, ends), strict=True):
            limits = token_limit(task), stop, thinking, end_ids, min_new_tokens(task)
            yield Prompt(task.task_name, doc_id, array("I", ids), border, *limits)


def render(
    task: ConfigurableTask,
    doc: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    thinking: bool = False,
    *,
    template: str = "The chat template",
    where: str = "a document",
) -> str:
    """The whole prompt as text; in the chat template of `tokenizer`, if one is given.

    template, where: for sentences, the template and the document. Raises UserError where the document's text is not in
    the prompt.

    The answer prefix follows the assistant's header unchanged. (A template that were given it as an unfinished
    assistant turn might strip it, or put an empty thought before it.) With `thinking` there is no answer prefix.
    """

    def in_template(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        assert tokenizer is not None
        answer = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        turns = messages[:-1] if answer else messages
        header = chat_template.render(tokenizer, turns, template=template, where=where, add_generation_prompt=True)
        return header + answer

    context = task.fewshot_context(
        doc,
        num_fewshot=task.config.num_fewshot or 0,
        apply_chat_template=tokenizer is not None,
        fewshot_as_multiturn=True,
        chat_template=in_template if tokenizer is not None else None,
        gen_prefix=None if thinking else task.doc_to_prefix(doc) or None,
    )
    request = task.construct_requests(doc, context, metadata=(task.task_name, 0, 1))
    prompt, asked = str(request.arguments[0]), task.doc_to_text(doc)
    if isinstance(asked, str) and not chat_template.holds(prompt, asked):
        raise UserError(f"The prompt of {where} does not hold the text of its document, so it would not be asked.")
    return prompt


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


def _text_prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that the tokenizer puts in front of plain text: its BOS, or none. (`add_bos_token` is no sure sign.)"""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()


def _context_end(text: str, user_text: str, context: str, where: str) -> int:
    """The character at which the context ends in the rendered prompt, whose template may strip the user's turn.

    Raises UserError where the context does not stand in the prompt as it is. where: the document, for the sentence.
    """
    context_start = user_text.find(context)
    blanks = len(user_text) - len(user_text.lstrip())
    for turn, cut in ((user_text, 0), (user_text.strip(), blanks)):
        start = text.rfind(turn)
        if context_start >= 0 and start >= 0:
            return start + min(max(context_start + len(context) - cut, 0), len(turn))
    raise UserError(
        f"The context of {where} does not stand in its prompt as in the document, so the border before the question "
        "cannot be found: use --question seen."
    )


def _listed(value: Any) -> list[str]:
    """A list from None, a string or a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)
