"""The texts of the suite: packed to the context, the same for any limit, tokens as they are in the whole text."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evictbench.errors import UserError
from evictbench.evaluation import tasks
from evictbench.suite import SuiteRequest
from evictbench.suites.fidelity import SUITE

WORDS = (
    *("river", "stone", "bright", "window", "letter", "morning", "quiet", "harbour"),
    *("seven", "paper", "walks", "over", "under", "because", "never", "again"),
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from evictbench.models import load

    return load.load_tokenizer(load.resolve("smollm2"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small files of made-up records in the benchmarks' formats, and a text."""
    (tmp_path / "gsm8k").mkdir()
    problems = [
        {
            "question": f"A {WORDS[i % 16]} costs {i} coins. What do {i + 2} cost?",
            "answer": f"They cost {i} * {i + 2} = <<{i}*{i + 2}={i * (i + 2)}>>{i * (i + 2)}.\n#### {i * (i + 2)}",
        }
        for i in range(3, 43)
    ]
    (tmp_path / "gsm8k" / "test.jsonl").write_text("\n".join(map(json.dumps, problems)))
    (tmp_path / "longbench").mkdir()
    contexts = [
        {"input": "", "context": made_up(900 * (i + 1), i), "answers": ["-"], "length": 1, "all_classes": None}
        for i in range(4)
    ]
    (tmp_path / "longbench" / "gov_report.jsonl").write_text("\n".join(map(json.dumps, contexts)))
    (tmp_path / "book.txt").write_text(made_up(5_000, 9))
    return tmp_path


def made_up(words: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) + (".\n" if i % 13 == 12 else "") for i in range(words))


def request(tokenizer: Any, folder: Path, **changes: Any) -> SuiteRequest:
    asked = SuiteRequest(
        tokenizer=tokenizer,
        chat=True,
        context=256,
        limit=4,
        data_dir=folder,
        haystack=folder / "book.txt",
        window=8192,
    )
    return replace(asked, **changes)


def documents(asked: SuiteRequest) -> dict[str, list[dict[str, Any]]]:
    prepared = SUITE.prepare(asked)
    loaded = tasks.load_tasks(SUITE, prepared)
    return {name: list(task.task_docs) for name, task in loaded.items()}


def prompt_ids(tokenizer: Any, asked: SuiteRequest, name: str) -> list[list[int]]:
    loaded = tasks.load_tasks(SUITE, SUITE.prepare(asked))
    made = tasks.prompts(loaded[name], tokenizer, chat=True, context_field=None, limit=None)
    return [list(prompt.ids) for prompt in made]


@pytest.mark.parametrize("name", ["gsm8k", "longbench", "text"])
def test_texts_are_packed_to_the_context(tokenizer: Any, folder: Path, name: str) -> None:
    asked = request(tokenizer, folder, tasks=(name,))
    docs = documents(asked)[name]
    assert len(docs) == 4
    for ids, doc in zip(prompt_ids(tokenizer, asked, name), docs, strict=True):
        total = len(ids) + len(doc["continuation_ids"])
        assert total <= 256
        assert total > 256 - (90 if name == "gsm8k" else 8), "room for one more problem, or one more word, is left"
        assert len(doc["continuation_ids"]) == 128 or name == "gsm8k"
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)[
            :12
        ] not in tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["gsm8k", "longbench", "text"])
def test_tokens_are_those_of_the_whole_text(tokenizer: Any, folder: Path, name: str) -> None:
    """Encoding prompt and continuation as one text gives the same ids as the two parts."""
    for doc in documents(request(tokenizer, folder, tasks=(name,)))[name]:
        prompt = tokenizer(doc["input"], add_special_tokens=False)["input_ids"]
        whole = doc["input"] + tokenizer.decode(doc["continuation_ids"])
        assert tokenizer(whole, add_special_tokens=False)["input_ids"] == prompt + doc["continuation_ids"]


def test_continuations_are_what_the_source_says(tokenizer: Any, folder: Path) -> None:
    found = documents(request(tokenizer, folder, tasks=("gsm8k", "longbench", "text", "ruler"), context=1024))
    for doc in found["gsm8k"]:
        assert doc["input"].endswith("\nAnswer:")
        question = doc["input"].rpartition("Question: ")[2]
        first = int(question.split(" costs ")[1].split()[0])
        assert tokenizer.decode(doc["continuation_ids"]).endswith(f"#### {first * (first + 2)}")
        assert "<<" not in doc["input"] + doc["continuation"]
        solved = doc["input"].split("Question: ")[1:]
        assert len(solved) == len(set(solved)) > 10, "a problem comes twice, or there is room for more"
    book = (folder / "book.txt").read_text()
    places = []
    for doc in found["text"]:
        text = doc["input"] + tokenizer.decode(doc["continuation_ids"])
        assert text in book
        places.append((book.index(text), len(text)))
    places.sort()
    assert all(at + length <= after for (at, length), (after, _) in itertools.pairwise(places))
    for doc in found["longbench"]:
        contexts = [json.loads(line)["context"] for line in (folder / "longbench/gov_report.jsonl").open()]
        assert any(text.startswith(doc["input"] + tokenizer.decode(doc["continuation_ids"])) for text in contexts)
    for doc in found["ruler"]:
        assert doc["continuation"].strip(" .").split(", ")[0] in doc["input"]


def test_a_limit_and_a_seed(tokenizer: Any, folder: Path) -> None:
    """More texts extend fewer; another seed draws others."""
    few, many = (documents(request(tokenizer, folder, limit=limit)) for limit in (2, 5))
    assert set(few) == {"gsm8k", "longbench", "text"}
    for name in few:
        assert many[name][:2] == few[name]
    other = documents(request(tokenizer, folder, limit=2, seed=1))
    assert other["gsm8k"] != few["gsm8k"]
    assert other["text"] != few["text"]


def test_what_cannot_be_had_is_said(tokenizer: Any, folder: Path, tmp_path: Path) -> None:
    prepared = SUITE.prepare(request(tokenizer, folder, haystack=None))
    assert "--haystack" in prepared.skipped["text"]
    assert "at least" in prepared.skipped["ruler"]
    assert prepared.tasks == ("gsm8k", "longbench")
    assert all("sha256:" in value for value in prepared.data.values())
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="No task of fidelity"):
        SUITE.prepare(request(tokenizer, empty, haystack=None))
    for changes, words in (
        ({"tasks": ("text",), "haystack": None}, "--haystack FILE"),
        ({"tasks": ("text",), "context": 60_000, "window": None}, "smaller --context"),
        ({"tasks": ("longbench",), "context": 60_000}, "smaller --context"),
        ({"context": 20}, "at least 64"),
        ({"tasks": ("gsm8k",), "data_dir": empty}, "GSM8K"),
    ):
        with pytest.raises(UserError, match=words):
            SUITE.prepare(request(tokenizer, folder, **changes))


def test_max_new_tokens_sets_the_continuation(tokenizer: Any, folder: Path) -> None:
    docs = documents(request(tokenizer, folder, tasks=("text",), max_new_tokens=32))["text"]
    assert {len(doc["continuation_ids"]) for doc in docs} == {32}
