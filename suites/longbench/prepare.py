"""Making the tasks of a request ready: their records are read and checked, and the room for prompts is computed."""

from __future__ import annotations

import ast
import json
from typing import Any

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest, datasets
from evictbench.suite.tasks import prepare_each, task_names

from .cut import Cutter
from .documents import Samples
from .metrics import PARAGRAPH
from .tasks import ARCHIVE, DOCUMENTS, HUB, LONGBENCH_E, OFFICIAL, PROTOCOLS, REVISION, TASKS, Task
from .templates import TEMPLATES


def prepare(request: SuiteRequest) -> PreparedSuite:
    """Make the tasks of a request ready; see evictbench.suite.spec.Suite for what may be raised."""
    names = task_names(request, "LongBench", TASKS, PROTOCOLS["default"].tasks)
    if request.limit is not None and request.limit < 1:
        raise UserError(f"The number of samples must be at least 1, not {request.limit}.")
    read: dict[str, datasets.Loaded] = {}

    def prepare_task(name: str) -> Samples:
        task = TASKS[name]
        if task.records not in read:
            read[task.records] = _load(task, request)
        records = read[task.records].records[: request.limit]
        return Samples(name, TEMPLATES[task.template], records, _cutter(task, request))

    samples, skipped = prepare_each(request, "LongBench", names, prepare_task)
    return PreparedSuite(
        tasks=tuple(samples),
        metadata={"longbench_samples": samples},
        skipped=skipped,
        data={f"longbench/{name}.jsonl": f"sha256:{loaded.sha256}" for name, loaded in read.items()},
        warnings=tuple(
            missing
            for name, loaded in read.items()
            if (missing := datasets.incomplete(DATASETS[name], loaded, request.limit))
        ),
    )


def dataset(task: Task) -> datasets.Dataset:
    """Where a task's records are found."""
    fields = ["input", "context", "answers", "length"]
    if task.metric == "classification":
        fields.append("all_classes")
    return datasets.Dataset(
        name=f"LongBench {task.records}",
        files=(
            f"{task.records}.jsonl",
            f"data/{task.records}.jsonl",
            f"{ARCHIVE}/data/{task.records}.jsonl",
            f"{ARCHIVE}/{task.records}.jsonl",
            f"{task.records}.parquet",
            f"data/{task.records}.parquet",
            f"{task.records}/test-*-of-*.parquet",
            f"{task.records}/test/*.parquet",
            f"{task.records}.json",
            f"data/{task.records}.json",
        ),
        folder="longbench",
        folders=("LongBench", "LongBench/LongBench"),
        repositories=("THUDM/LongBench",),
        documents=DOCUMENTS[task.records],
        hub=HUB,
        revision=REVISION,
        config=None,
        split="test",
        fields=tuple(fields),
        hub_file=f"{ARCHIVE}/data/{task.records}.jsonl",
    )


DATASETS = {name: dataset(task) for name, task in {**OFFICIAL, **LONGBENCH_E}.items()}
"""By the name of the records, which several tasks share."""


def _load(task: Task, request: SuiteRequest) -> datasets.Loaded:
    """A task's records, their fields checked and lists read. Raises UserError for the first bad record."""
    loaded = datasets.load(DATASETS[task.records], request.data_dir)
    for number, record in enumerate(loaded.records, start=1):
        where = f"{datasets.place(loaded.origin, request.data_dir)}: record {number}"
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
    """A list of texts; some copies of the data hold it as JSON or Python text. None for anything else."""
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
    limits = [tokens for tokens in (request.window, request.context) if tokens is not None]
    answer = request.max_new_tokens or task.answer_tokens
    room = min(limits) - answer if limits else None
    return Cutter(request.tokenizer, chat=request.chat and task.chat, room=room)
