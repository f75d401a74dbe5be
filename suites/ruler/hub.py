"""The hub's copies of SQuAD, HotpotQA and the essays, where the hub can be reached; quick to say no."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

SQUAD = ("rajpurkar/squad_v2",)
HOTPOTQA = ("hotpotqa/hotpot_qa", "distractor")
ESSAYS = ("baber/paul_graham_essays",)  # upstream's essays, as lm-eval takes them

_PATIENCE = 3.0  # seconds


@dataclass(frozen=True)
class Found:
    """name: the data set on the hub. records: in the format of the data set's own json files."""

    name: str
    records: list[Any]


def squad() -> Found | str:
    """SQuAD v2's validation articles, or why they cannot be had."""
    rows = _rows(SQUAD, "validation")
    if isinstance(rows, str):
        return rows
    return Found(" ".join(SQUAD), squad_records(rows))


def hotpotqa() -> Found | str:
    """HotpotQA's validation questions in the distractor setting, or why they cannot be had."""
    rows = _rows(HOTPOTQA, "validation")
    if isinstance(rows, str):
        return rows
    return Found(" ".join(HOTPOTQA), hotpotqa_records(rows))


def essays() -> Found | str:
    """Texts of the essays, or why they cannot be had."""
    rows = _rows(ESSAYS, "train")
    return rows if isinstance(rows, str) else Found(" ".join(ESSAYS), [row["text"] for row in rows])


def squad_records(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The hub's rows as articles of SQuAD's own json files."""
    articles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        questions = articles.setdefault(row["title"], {}).setdefault(row["context"], [])
        answers = [{"text": text} for text in row["answers"]["text"]]
        questions.append({"question": row["question"], "answers": answers})
    return [
        {"title": title, "paragraphs": [{"context": text, "qas": qas} for text, qas in paragraphs.items()]}
        for title, paragraphs in articles.items()
    ]


def hotpotqa_records(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The hub's rows as questions of HotpotQA's own json files."""
    records = []
    for row in rows:
        pairs = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
        context = [[title, list(sentences)] for title, sentences in pairs]
        records.append({"question": row["question"], "answer": row["answer"], "context": context})
    return records


def _rows(name: tuple[str, ...], split: str) -> Any:
    if reason := _unreachable():
        return reason
    from datasets import load_dataset
    from huggingface_hub import constants

    try:
        return load_dataset(*name, split=split)
    except Exception as error:  # the library raises many kinds, none of them promised
        if constants.HF_HUB_OFFLINE:
            return f"HF_HUB_OFFLINE is set and {name[0]} is not in the cache"
        return f"{name[0]} did not load ({type(error).__name__})"


@lru_cache(maxsize=1)
def _unreachable() -> str | None:
    """Why the hub cannot be asked, within a few seconds; None if it can, or if its cache is to answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None  # `datasets` then looks in its cache alone, and answers at once
    answer: list[str | None] = []
    probe = threading.Thread(target=lambda: answer.append(_probe(constants.ENDPOINT)), daemon=True)
    probe.start()
    probe.join(_PATIENCE + 1)
    return answer[0] if answer else f"no answer within {_PATIENCE:.0f} s"


def _probe(endpoint: str) -> str | None:
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_PATIENCE).close()
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}" if error.code in (403, 407) or error.code >= 500 else None
    except OSError as error:
        reason = getattr(error, "reason", error)
        return f"it cannot be reached ({reason})"
    return None
