"""From a request to tasks that are ready: their records found and checked, and the room that prompts have."""

from __future__ import annotations

import ast
import json
from difflib import get_close_matches
from typing import Any

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest, datasets

from .cut import Cutter
from .documents import Samples
from .metrics import PARAGRAPH
from .tasks import ARCHIVE, HUB, PROTOCOLS, REVISION, TASKS, Task
from .templates import TEMPLATES


def prepare(request: SuiteRequest) -> PreparedSuite:
    """Make the tasks of a request ready; see evictbench.suite.spec.Suite for what may be raised."""
    names = _names(request.tasks)
    if request.limit is not None and request.limit < 1:
        raise UserError(f"The number of samples must be at least 1, not {request.limit}.")
    found: dict[str, datasets.Loaded] = {}
    samples: dict[str, Samples] = {}
    skipped: dict[str, str] = {}
    for name in names:
        task = TASKS[name]
        try:
            if task.records not in found:
                found[task.records] = _load(task, request)
        except datasets.Unavailable as error:
            if request.tasks and request.named:
                raise
            skipped[name] = str(error)
            continue
        records = found[task.records].records[: request.limit]
        samples[name] = Samples(name, TEMPLATES[task.template], records, _cutter(task, request))
    if not samples:
        raise UserError(f"No task of LongBench can be run. {next(iter(skipped.values()))}")
    return PreparedSuite(
        tasks=tuple(samples),
        metadata={"longbench_samples": samples},
        skipped=skipped,
        data={f"longbench/{name}.jsonl": f"sha256:{loaded.sha256}" for name, loaded in found.items()},
    )


def dataset(task: Task) -> datasets.Dataset:
    """Where a task's records are found."""
    fields = ["input", "context", "answers", "length"]
    if task.metric == "classification":
        fields.append("all_classes")
    return datasets.Dataset(
        name=f"LongBench {task.records}",
        files=(f"{task.records}.jsonl", f"data/{task.records}.jsonl"),
        folder="longbench",
        hub=HUB,
        revision=REVISION,
        config=None,
        split="test",
        fields=tuple(fields),
        hub_file=f"{ARCHIVE}/data/{task.records}.jsonl",
    )


def _names(asked: tuple[str, ...] | None) -> tuple[str, ...]:
    for name in asked or ():
        if name not in TASKS:
            near = get_close_matches(name, TASKS, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(TASKS)}."
            raise UserError(f"LongBench has no task {name!r}; {hint}")
    return tuple(dict.fromkeys(asked)) if asked else PROTOCOLS["default"].tasks


def _load(task: Task, request: SuiteRequest) -> datasets.Loaded:
    loaded = datasets.load(dataset(task), request.data_dir)
    for number, record in enumerate(loaded.records, start=1):
        where = f"{loaded.origin}: record {number}"
        for field in ("input", "context"):
            if not isinstance(record[field], str):
                raise UserError(f"{where}: the field {field!r} is not a text.")
        if not isinstance(record["length"], int):
            raise UserError(f"{where}: the field 'length' is not a number of words.")
        for field in ("answers", "all_classes") if task.metric == "classification" else ("answers",):
            texts = _texts(record[field])
            if texts is None:
                raise UserError(f"{where}: the field {field!r} is not a list of texts.")
            record[field] = texts
        if task.metric == "retrieval" and not all(PARAGRAPH.search(answer) for answer in record["answers"]):
            raise UserError(f"{where}: an answer names no paragraph (as in 'Paragraph 3').")
    return loaded


def _texts(value: Any) -> list[str] | None:
    """A list of texts, or one written out as text (some copies of the data have that); None for anything else."""
    if isinstance(value, str):
        for reader in (json.loads, ast.literal_eval):
            try:
                value = reader(value)
                break
            except (ValueError, SyntaxError):
                continue
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return value
    return None


def _cutter(task: Task, request: SuiteRequest) -> Cutter:
    holds = [tokens for tokens in (request.window, request.context) if tokens is not None]
    answer = request.max_new_tokens or task.answer_tokens
    room = min(holds) - answer if holds else None
    return Cutter(request.tokenizer, chat=request.chat and task.chat, room=room)
