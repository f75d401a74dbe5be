"""The documents and questions of SQuAD and HotpotQA, from files or from the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evictbench.errors import UserError
from evictbench.suite.datasets import Unavailable

from . import hub

Dataset = Literal["squad", "hotpotqa"]


@dataclass(frozen=True)
class Question:
    """A question, its acceptable answers, and numbers of documents.

    documents: those that the question is about, always shown. related: of the same article, shown next.
    """

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """Documents and questions about them. source: where they were read. name: source, sizes, hash, for the result."""

    source: str
    name: str
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


def find(dataset: Dataset, data_dir: Path | None) -> Corpus:
    """The corpus of a data set, from `data_dir` if it is there, else from the hub if that can be reached.

    Looks for *.json in <data_dir>/<dataset> and <data_dir>/ruler/<dataset>. Raises Unavailable where there
    is nothing, and UserError naming the file and the field where a file has another format.
    """
    for folder in (data_dir / dataset, data_dir / "ruler" / dataset) if data_dir else ():
        if files := sorted(folder.glob("*.json")):
            return from_files(dataset, files)
    copy = hub.squad() if dataset == "squad" else hub.hotpotqa()
    if isinstance(copy, str):
        looked = f"in {data_dir / dataset} (*.json)" if data_dir else f"in a data folder ({dataset}/*.json)"
        raise Unavailable(f"The {dataset} data is neither {looked} nor to be had from the hub: {copy}.")
    return _corpus(dataset, copy.name, [(f"{copy.name}[{i}]", record) for i, record in enumerate(copy.records)])


def from_files(dataset: Dataset, files: Iterable[Path]) -> Corpus:
    """Read files in SQuAD's or HotpotQA's own JSON format; several are read as one."""
    records: list[tuple[str, Any]] = []
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise UserError(f"{file} is not valid JSON: {error}.") from error
        if dataset == "squad":
            content = _field(content, "data", list, str(file))
        elif not isinstance(content, list):
            raise UserError(f"{file}: expected a list of questions, found {type(content).__name__}.")
        records += [(f"{file}: {'data' if dataset == 'squad' else ''}[{i}]", r) for i, r in enumerate(content)]
    name = ", ".join(file.name for file in files)
    return _corpus(dataset, name, records)


Entry = tuple[str, list[str], list[str], list[str]]  # question, answers, own documents, related documents
Reader = Callable[[str, Any], list[Entry]]


def _corpus(dataset: Dataset, source: str, records: Iterable[tuple[str, Any]]) -> Corpus:
    entries = [entry for where, record in records for entry in _READERS[dataset](where, record)]
    if not entries:
        raise UserError(f"{source} holds no {dataset} question that has an answer.")
    texts = sorted({text for _, _, own, related in entries for text in (*own, *related)})
    number = {text: i for i, text in enumerate(texts)}
    questions = tuple(
        Question(
            text,
            tuple(dict.fromkeys(answers)),
            tuple(dict.fromkeys(number[document] for document in own)),
            tuple(dict.fromkeys(number[document] for document in related if document not in own)),
        )
        for text, answers, own, related in entries
    )
    content = [texts, [(q.text, q.answers, q.documents, q.related) for q in questions]]
    digest = hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
    name = f"{source} ({len(questions)} questions, {len(texts)} documents) sha256:{digest}"
    return Corpus(source, name, tuple(texts), questions)


def _squad_article(where: str, article: Any) -> list[Entry]:
    paragraphs = _field(article, "paragraphs", list, where)
    contexts = [_field(p, "context", str, f"{where}.paragraphs[{i}]") for i, p in enumerate(paragraphs)]
    entries: list[Entry] = []
    for i, (paragraph, context) in enumerate(zip(paragraphs, contexts, strict=True)):
        inside = f"{where}.paragraphs[{i}]"
        for j, qa in enumerate(_field(paragraph, "qas", list, inside)):
            place = f"{inside}.qas[{j}]"
            question = _field(qa, "question", str, place)
            answers = _field(qa, "answers", list, place)
            texts = [_field(a, "text", str, f"{place}.answers[{k}]") for k, a in enumerate(answers)]
            if (texts := [text for text in texts if text.strip()]) and not qa.get("is_impossible", False):
                entries.append((question, texts, [context], contexts))
    return entries


def _hotpotqa_record(where: str, record: Any) -> list[Entry]:
    question = _field(record, "question", str, where)
    answer = _field(record, "answer", str, where)
    documents = []
    for i, pair in enumerate(_field(record, "context", list, where)):
        if not (isinstance(pair, list) and len(pair) == 2 and _is_texts([pair[0]]) and _is_texts(pair[1])):
            raise UserError(f"{where}: the field context[{i}] is not a title and a list of sentences.")
        documents.append(f"{pair[0]}\n{''.join(pair[1])}")
    return [(question, [answer], documents, [])] if answer.strip() and documents else []


def _field(record: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(record, dict):
        raise UserError(f"{where} is not an object with the field {name}.")
    if name not in record:
        raise UserError(f"{where} has no field {name}.")
    if not isinstance(record[name], kind):
        raise UserError(f"{where}: the field {name} is {type(record[name]).__name__}, not {kind.__name__}.")
    return record[name]


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


_READERS: dict[Dataset, Reader] = {"squad": _squad_article, "hotpotqa": _hotpotqa_record}
