"""MATH-500's data, prompt and protocols, on problems made for these tests."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from evictbench.errors import UserError
from evictbench.suite import Sampling, SuiteRequest
from evictbench.suites.math500 import SUITE

RECORDS = [
    {
        "problem": "What is half of $\\frac{1}{2}$?\nGive a fraction.",
        "solution": "It is $\\boxed{\\frac{1}{4}}$.",
        "answer": "\\frac{1}{4}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/0.json",
    },
    {"problem": "What is $2 + 3$?", "answer": "5", "subject": "Algebra", "level": 1, "unique_id": "test/1.json"},
]


def request(folder, **changes) -> SuiteRequest:
    return SuiteRequest(tokenizer=None, chat=True, data_dir=folder, **changes)


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_data_prompt_and_score(tmp_path):
    from evictbench.evaluation.tasks import load_tasks, render, score

    write(tmp_path / "MATH-500" / "test.jsonl", RECORDS)
    prepared = SUITE.prepare(request(tmp_path))
    assert prepared.tasks == ("math500",)
    assert prepared.data["MATH-500/test.jsonl"].startswith("sha256:")
    for package in ("math-verify", "antlr4-python3-runtime", "sympy"):  # verdicts depend on each of them
        assert prepared.data[package] == version(package)
    task = load_tasks(SUITE, prepared)["math500"]
    assert render(task, task.task_docs[0], None) == (
        "What is half of $\\frac{1}{2}$?\nGive a fraction.\n"
        "Please reason step by step, and put your final answer within \\boxed{}."
    )
    assert task.VERSION == 2.0
    assert task.config.generation_kwargs["max_gen_toks"] == 32768
    assert [doc["answer"] for doc in task.task_docs] == ["\\frac{1}{4}", "5"]
    assert score(task, 0, "So \\boxed{0.25}.").score == 1
    assert score(task, 1, "So \\boxed{0.25}.").score == 0


def test_chat_template(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from evictbench.evaluation.tasks import load_tasks, render

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    write(tmp_path / "math500.jsonl", RECORDS)
    task = load_tasks(SUITE, SUITE.prepare(request(tmp_path)))["math500"]
    assert render(task, task.task_docs[1], tokenizer) == (
        "<|user|>What is $2 + 3$?\nPlease reason step by step, and put your final answer within \\boxed{}.<|assistant|>"
    )


def test_bad_input(tmp_path):
    with pytest.raises(UserError, match=r"no MATH-500 data: looked for math500.jsonl"):
        SUITE.prepare(request(tmp_path))
    write(tmp_path / "math500.jsonl", [*RECORDS, {"problem": "x", "answer": "\\frac{1}{2"}])
    with pytest.raises(UserError, match=r"math500.jsonl: record 3: the braces of the answer .* do not balance"):
        SUITE.prepare(request(tmp_path))
    write(tmp_path / "math500.jsonl", [{"problem": "x"}])
    with pytest.raises(UserError, match=r"math500.jsonl: record 1 has no answer"):
        SUITE.prepare(request(tmp_path))
    for broken in (["5"], {"value": 5}, True):
        write(tmp_path / "math500.jsonl", [{"problem": "x", "answer": broken}])
        with pytest.raises(UserError, match=r"record 1: the field answer holds .*, and has to hold a text or a number"):
            SUITE.prepare(request(tmp_path))
    write(tmp_path / "math500.jsonl", [{"problem": "x", "answer": "1" * 1001}])
    with pytest.raises(
        UserError, match=r"math500.jsonl: record 1: the answer has 1,001 characters, more than the 1,000"
    ):
        SUITE.prepare(request(tmp_path))
    with pytest.raises(UserError, match=r"Unknown task 'math' of math500: did you mean math500\?"):
        SUITE.prepare(request(tmp_path, tasks=("math",)))


def test_a_gold_of_sets_is_no_broken_gold(tmp_path):
    write(
        tmp_path / "math500.jsonl", [{"problem": "x", "answer": "\\{1, 2\\}"}, {"problem": "x", "answer": "\\left\\{1"}]
    )
    assert SUITE.prepare(request(tmp_path)).tasks == ("math500",)


def test_protocols():
    thinking = Sampling(0.6, 0.95, 20, 0.0)
    assert {name: (p.repeats, p.sampling, p.max_new_tokens) for name, p in SUITE.protocols.items()} == {
        "default": (1, thinking, None),
        "indexmem_pp": (2, thinking, 16_384),
        "greedy": (1, Sampling(), None),
    }
    assert [name for name, p in SUITE.protocols.items() if p.thinking] == ["indexmem_pp"]
    assert all(p.source and p.tasks == ("math500",) for p in SUITE.protocols.values())
