"""The documents and questions of SQuAD and HotpotQA, from files or from the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from evictbench.errors import UserError, first_line
from evictbench.suite.datasets import Unavailable
from evictbench.suite.layouts import Layout, candidates
from evictbench.suite.records import read as read_records
from evictbench.suite.survey import DataFound, look_for

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


LAYOUTS: dict[Dataset, tuple[Layout, ...]] = {
    "squad": (
        *(Layout((name,)) for name in ("dev-v2.0.json", "dev-v1.1.json", "squad.json")),
        *(Layout((f"{folder}json/squad.json",)) for folder in ("", "data/synthetic/", "scripts/data/synthetic/")),
        Layout(("squad_v2/validation-*-of-*.parquet",)),
        Layout(("squad_v2/validation/*.parquet",)),
        Layout(("plain_text/validation-*-of-*.parquet",)),
    ),
    "hotpotqa": (
        *(Layout((name,)) for name in ("hotpot_dev_distractor_v1.json", "hotpotqa.json")),
        *(Layout((f"{folder}json/hotpotqa.json",)) for folder in ("", "data/synthetic/", "scripts/data/synthetic/")),
        Layout(("distractor/validation-*-of-*.parquet",)),
        Layout(("distractor/validation/*.parquet",)),
    ),
}
"""Files that hold a data set where it has no folder of its own: by its authors, by upstream's scripts, by the hub."""

FOLDERS: dict[Dataset, tuple[str, ...]] = {
    "squad": ("squad", "SQuAD", "ruler", "RULER"),
    "hotpotqa": ("hotpotqa", "HotpotQA", "hotpot_qa", "ruler", "RULER"),
}
REPOSITORIES: dict[Dataset, tuple[str, ...]] = {
    "squad": ("rajpurkar/squad_v2", "rajpurkar/squad"),
    "hotpotqa": ("hotpotqa/hotpot_qa",),
}


def find(dataset: Dataset, data_dir: Path | None) -> Corpus:
    """The corpus of a data set, from `data_dir` if it is there, else from the hub if that can be reached.

    Raises Unavailable where there is nothing, and UserError naming the file and the field where a file has another
    format.
    """
    if data_dir is not None and (found := _in_folder(dataset, data_dir)):
        return found[0]
    copy = hub.squad() if dataset == "squad" else hub.hotpotqa()
    if isinstance(copy, str):
        looked = f"in {data_dir / dataset} (*.json)" if data_dir else f"in a data folder ({dataset}/*.json)"
        raise Unavailable(f"The {dataset} data is neither {looked} nor to be had from the hub: {copy}.")
    return _corpus(dataset, copy.name, [(f"{copy.name}[{i}]", record) for i, record in enumerate(copy.records)])


def survey(data_dir: Path) -> list[DataFound]:
    """What a folder has of SQuAD and HotpotQA; any part of them will do."""

    def read(dataset: Dataset) -> tuple[str, int]:
        found = _in_folder(dataset, data_dir)
        if found is None:
            raise Unavailable(f"There is no {dataset} data in {data_dir}.")
        return found[1], len(found[0].questions)

    return [look_for(dataset, partial(read, dataset)) for dataset in LAYOUTS]


def _in_folder(dataset: Dataset, data_dir: Path) -> tuple[Corpus, str] | None:
    """The corpus that lies in a folder, and the names of its files: every *.json of <data_dir>/<dataset> or
    <data_dir>/ruler/<dataset>, else the first of LAYOUTS that is there."""
    for folder in (data_dir / dataset, data_dir / "ruler" / dataset):
        if files := sorted(folder.glob("*.json")):
            names = [file.relative_to(data_dir).as_posix() for file in files]
            return from_files(dataset, files), " + ".join(names)
    for candidate in candidates(data_dir, LAYOUTS[dataset], FOLDERS[dataset], REPOSITORIES[dataset]):
        files = [file.path for file in candidate.files]
        origin = " + ".join(file.name for file in candidate.files)
        if files[0].suffix == ".json":
            return from_files(dataset, files), origin
        return _from_rows(dataset, files), origin
    return None


def _from_rows(dataset: Dataset, files: Sequence[Path]) -> Corpus:
    """Read the hub's parquet files."""
    name = ", ".join(file.name for file in files)
    rows = [row for file in files for row in read_records(file)]
    try:
        records = hub.squad_records(rows) if dataset == "squad" else hub.hotpotqa_records(rows)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{files[0]} has not the fields of {dataset} on the hub ({first_line(error)}).") from error
    return _corpus(dataset, name, [(f"{name}[{i}]", record) for i, record in enumerate(records)])


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
