"""The sources of texts: GSM8K solutions, LongBench contexts, RULER answers, a text file of the user's own.

Text i depends on the seed, the tokenizer and the room, but not on how many texts are asked for.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from evictbench.errors import UserError
from evictbench.evaluation.tasks import load_tasks
from evictbench.suite import SuiteRequest
from evictbench.suite.datasets import Record, Unavailable, load

from ..gsm8k.prepare import DATASET as GSM8K
from ..longbench.prepare import dataset as longbench_dataset
from ..longbench.tasks import TASKS as LONGBENCH_TASKS
from ..ruler import SUITE as RULER_SUITE
from .fit import Encoder, Words

LONGBENCH = ("gov_report", "qmsum", "qasper", "narrativeqa", "multi_news")
"""Tasks whose contexts are prose. Those whose data is there are used."""

RULER = ("niah_multivalue", "niah_multiquery", "vt", "cwe")
"""Tasks with more than one word to an answer."""

_CALCULATION = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True)
class Room:
    """Lengths in tokens. total: of prompt and continuation, without what the tokenizer puts around them. continuation:
    of the longest continuation."""

    total: int
    continuation: int


@dataclass(frozen=True)
class Texts:
    """records: texts with `input`, `continuation`, `continuation_ids`. data: what they are made of, name to hash."""

    records: Sequence[Record]
    data: dict[str, str] = field(default_factory=dict)


def gsm8k(request: SuiteRequest, encoder: Encoder, room: Room, limit: int) -> Texts:
    """Solved problems and a question as the prompt, its reference solution as the continuation."""
    loaded = load(GSM8K, request.data_dir)
    solved = [
        (f"Question: {record['question'].strip()}\nAnswer:", f" {_CALCULATION.sub('', record['answer']).strip()}")
        for record in loaded.records
    ]
    sizes = encoder.counts([f"{question}{answer}\n\n" for question, answer in solved])
    texts = []
    for number in islice(_shuffled(len(solved), f"gsm8k {request.seed}"), limit):
        question, answer = solved[number]
        continuation = encoder.after(question, answer)[: room.continuation]
        left = room.total - len(continuation)
        examples: list[str] = []
        size = len(encoder.ids(question))
        for other in _shuffled(len(solved), f"gsm8k {request.seed} {number}"):
            if other != number:
                size += sizes[other]
                if size > left:
                    break
                examples.append(f"{solved[other][0]}{solved[other][1]}\n\n")
        while len(encoder.ids("".join(examples) + question)) > left:
            if not examples:
                raise Unavailable(
                    f"A GSM8K question has {len(encoder.ids(question))} tokens, more than a context of {room.total} "
                    "leaves for it: use a larger --context."
                )
            examples.pop()
        texts.append(_text("".join(examples) + question, answer, continuation))
    return Texts(texts, {"gsm8k": f"{loaded.origin} sha256:{loaded.sha256}"})


def longbench(request: SuiteRequest, encoder: Encoder, room: Room, limit: int) -> Texts:
    """The beginning of a context as the prompt, and what follows in it as the continuation."""
    contexts: list[str] = []
    data: dict[str, str] = {}
    missing: list[Unavailable] = []
    for name in LONGBENCH:
        try:
            loaded = load(longbench_dataset(LONGBENCH_TASKS[name]), request.data_dir)
        except Unavailable as error:
            missing.append(error)
            continue
        contexts += [record["context"] for record in loaded.records]
        data[f"longbench {name}"] = f"{loaded.origin} sha256:{loaded.sha256}"
    if not contexts:
        raise missing[0]

    def windows() -> Iterator[Record]:
        for number in _shuffled(len(contexts), f"longbench {request.seed}"):
            words = Words(contexts[number][: 40 * room.total], encoder)
            if window := words.window(0, room.total - room.continuation, room.continuation):
                yield _text(window[0], "", window[1])

    texts = list(islice(windows(), limit))
    if not texts:
        raise Unavailable(
            f"No LongBench context of {', '.join(data)} has {room.total} tokens: use a smaller --context."
        )
    return Texts(texts, data)


def ruler(request: SuiteRequest, encoder: Encoder, room: Room, limit: int) -> Texts:
    """A RULER prompt with its answer prefix, and the reference answers as the continuation. Tasks take turns."""
    documents: list[Sequence[Record]] = []
    data: dict[str, str] = {}
    too_long: list[UserError] = []
    for name in RULER:
        asked = replace(request, tasks=(name,), chat=False, context=room.total, limit=limit)
        try:
            prepared = RULER_SUITE.prepare(asked)
        except UserError as error:
            too_long.append(error)
            continue
        documents.append(load_tasks(RULER_SUITE, prepared)[name].task_docs)
        data |= prepared.data
    if not documents:
        raise Unavailable(str(too_long[0]))
    texts = []
    for number in range(min(limit, len(documents) * len(documents[0]))):
        turn, task = divmod(number, len(documents))
        doc = documents[task][turn]
        prompt, answer = f"{doc['input']} {doc['gen_prefix']}", f" {', '.join(doc['outputs'])}."
        texts.append(_text(prompt, answer, encoder.after(prompt, answer)[: room.continuation]))
    return Texts(texts, {f"ruler {name}": value for name, value in data.items()})


def text(request: SuiteRequest, encoder: Encoder, room: Room, limit: int) -> Texts:
    """Pieces of the file given with --haystack, no two of which overlap."""
    path = request.haystack
    if path is None:
        raise Unavailable("The task text reads a file of yours: name it with --haystack FILE.")
    whole = _read(path)
    words = Words(whole, encoder)
    pieces = words.tokens // room.total

    def windows() -> Iterator[Record]:
        for number in _shuffled(pieces, f"text {request.seed}"):
            window = words.window(number * room.total, room.total - room.continuation, room.continuation)
            if window:
                yield _text(window[0], "", window[1])

    texts = list(islice(windows(), limit))
    if not texts:
        raise UserError(
            f"{path} has about {words.tokens} tokens, fewer than one text of {room.total}: use a smaller --context."
        )
    digest = hashlib.sha256(whole.encode()).hexdigest()
    return Texts(texts, {"text": f"{path.name} sha256:{digest}"})


def _text(prompt: str, continuation: str, ids: Sequence[int]) -> Record:
    return {"input": prompt, "continuation": continuation, "continuation_ids": list(ids)}


def _shuffled(count: int, name: str) -> Iterator[int]:
    numbers = list(range(count))
    random.Random(name).shuffle(numbers)
    return iter(numbers)


def _read(path: Path) -> str:
    """A text file, or every *.txt of a folder in order of name."""
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    try:
        found = "\n".join(file.read_text(encoding="utf-8") for file in files)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text.") from error
    if not found.strip():
        raise UserError(f"{path} holds no text.")
    return found
