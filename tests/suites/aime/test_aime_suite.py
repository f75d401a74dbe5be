"""AIME's data, prompts and protocols, on problems made for these tests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from evictbench.errors import UserError
from evictbench.suite import Sampling, SuiteRequest
from evictbench.suites.aime import SUITE

# the spellings of the copies on the hub: HuggingFaceH4, math-ai, Maxwell-Jia, opencompass
H4 = {
    "id": 1,
    "problem": "Find the number of days in a leap year's\nfirst 5 weeks, $5 \\cdot 7$.",
    "solution": "",
    "answer": "035",
}
MATH_AI = {"problem": "Let $n = {{2}}$. Find \\frac{n}{2}.", "answer": "1", "id": "0"}
MAXWELL = {"ID": "2024-I-1", "Problem": "What is $4 + 4$?", "Solution": "", "Answer": 8}
OPENCOMPASS = {"question": "What is $9 + 9$?", "answer": "18"}

CHAT = (
    "{{ '<s>' }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def request(folder, **changes) -> SuiteRequest:
    return SuiteRequest(tokenizer=None, chat=True, data_dir=folder, **changes)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "aime24.jsonl", H4, MAXWELL)
    write(tmp_path / "aime25" / "test.jsonl", MATH_AI, OPENCOMPASS)
    return tmp_path


def test_every_spelling_of_the_hub_is_read(folder):
    prepared = SUITE.prepare(request(folder))
    assert prepared.tasks == ("aime24", "aime25")
    documents = prepared.metadata["aime_problems"]
    assert [(d["index"], d["answer"]) for d in documents["aime24"]] == [(0, 35), (1, 8)]
    assert [(d["index"], d["answer"]) for d in documents["aime25"]] == [(0, 1), (1, 18)]
    assert set(prepared.data) == {"aime24.jsonl", "aime25/test.jsonl"}
    assert all(value.startswith("sha256:") for value in prepared.data.values())


@pytest.mark.parametrize(("limit", "warned"), [(None, True), (15, False), (20, True)])
def test_half_a_year_is_warned_of(tmp_path, limit, warned):
    write(tmp_path / "test2025-I.jsonl", *[{"problem": f"{n}?", "answer": n} for n in range(15)])
    prepared = SUITE.prepare(request(tmp_path, tasks=("aime25",), limit=limit))
    sentence = "15 of the 30 documents of AIME 2025 are missing: test2025-I.jsonl has 15, and the score is over those."
    assert prepared.warnings == ((sentence,) if warned else ())


@pytest.mark.parametrize("answer", [False, [1], {"value": 1}])
def test_an_answer_that_is_no_text_and_no_number_is_refused(tmp_path, answer):
    write(tmp_path / "aime25.jsonl", {"problem": "1?", "answer": answer})
    with pytest.raises(UserError, match=r"aime25\.jsonl: record 1: the field answer holds"):
        SUITE.prepare(request(tmp_path, tasks=("aime25",)))


def test_parquet_as_the_hub_keeps_it(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([MAXWELL]), tmp_path / "aime_2024_problems.parquet")
    prepared = SUITE.prepare(request(tmp_path, tasks=("aime24",)))
    assert prepared.metadata["aime_problems"]["aime24"][0]["answer"] == 8


def test_prompts(folder):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from evictbench.evaluation.tasks import load_tasks, render, score

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = CHAT
    tasks = load_tasks(SUITE, SUITE.prepare(request(folder)))
    ask = "Please reason step by step, and put your final answer within \\boxed{}."
    expected = {
        "aime24": f"Find the number of days in a leap year's\nfirst 5 weeks, $5 \\cdot 7$.\n{ask}",
        "aime25": f"Let $n = {{{{2}}}}$. Find \\frac{{n}}{{2}}.\n{ask}",
    }
    for name, text in expected.items():
        doc = tasks[name].task_docs[0]
        assert render(tasks[name], doc, None) == text
        assert render(tasks[name], doc, tokenizer) == f"<s><|user|>{text}</s><|assistant|>"
        assert "\\n" not in text
        assert tasks[name].VERSION == 2.0
        assert tasks[name].config.generation_kwargs["max_gen_toks"] == 32768
        assert tasks[name].config.generation_kwargs["until"] == []
    assert score(tasks["aime24"], 0, "So \\boxed{35}.").score == 1
    assert score(tasks["aime25"], 1, "So \\boxed{35}.").score == 0


def test_a_year_that_is_not_there_is_left_out_with_a_sentence_or_refused_by_name(tmp_path):
    write(tmp_path / "aime25.jsonl", OPENCOMPASS)
    prepared = SUITE.prepare(request(tmp_path))
    assert prepared.tasks == ("aime25",)
    assert "AIME 2024" in prepared.skipped["aime24"]
    assert "aime24.jsonl" in prepared.skipped["aime24"]
    with pytest.raises(UserError, match="AIME 2024"):
        SUITE.prepare(request(tmp_path, tasks=("aime24",)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="No task of aime can run"):
        SUITE.prepare(request(tmp_path / "empty"))


def test_one_year_never_answers_for_the_other(tmp_path):
    write(tmp_path / "test.jsonl", MATH_AI)
    with pytest.raises(UserError, match="No task of aime can run"):
        SUITE.prepare(request(tmp_path))


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"answer": "1"}, r"aime24.jsonl: record 2 has no problem \(a field problem, question, Problem or Question\)"),
        ({"problem": "x", "solution": "2"}, r"aime24.jsonl: record 2 has no answer"),
        ({"problem": "x", "answer": None}, r"aime24.jsonl: record 2 has no answer"),
        ({"problem": " ", "answer": 1}, r"aime24.jsonl: record 2 has no problem"),
        ({"problem": "x", "answer": "\\frac12"}, r"aime24.jsonl: record 2: the answer .* not an integer from 0 to 999"),
    ],
)
def test_broken_records_are_refused_even_in_the_default_set(folder, record, sentence):
    write(folder / "aime24.jsonl", H4, record)
    with pytest.raises(UserError, match=sentence):
        SUITE.prepare(request(folder))


def test_empty_file_and_unknown_task(folder):
    (folder / "aime24.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no records"):
        SUITE.prepare(request(folder))
    with pytest.raises(UserError, match=r"Unknown task 'aime23' of aime: did you mean aime2[45] or aime2[45]\?"):
        SUITE.prepare(request(folder, tasks=("aime23",)))


def test_tasks_that_were_not_prepared_say_so():
    from evictbench.suites.aime.problems import documents

    with pytest.raises(UserError, match="aime24 was not prepared"):
        documents("aime24")


def test_protocols():
    thinking = Sampling(0.6, 0.95, 20, 0.0)
    protocols = SUITE.protocols
    assert {name: (p.repeats, p.sampling, p.tasks) for name, p in protocols.items()} == {
        "default": (1, thinking, ("aime24", "aime25")),
        "kvpop": (16, thinking, ("aime24", "aime25")),
        "indexmem_pp": (8, thinking, ("aime25",)),
        "greedy": (1, Sampling(), ("aime24", "aime25")),
    }
    assert all(p.source for p in protocols.values())
    assert {name: (p.thinking, p.max_new_tokens) for name, p in protocols.items() if p.thinking is not None} == {
        "indexmem_pp": (True, 32_768)
    }
    assert protocols["kvpop"].sampling_for("Qwen/Qwen3-8B") == thinking
    assert protocols["kvpop"].sampling_for("Qwen/Qwen3-4B-Instruct-2507") == Sampling(0.7, 0.8, 20, 0.0)
    assert protocols["kvpop"].sampling_for("Qwen/Qwen3-4B-Thinking-2507") == thinking


def test_importing_the_suite_imports_nothing_heavy():
    script = (
        "import sys; import evictbench.suites.aime; import evictbench.suites.hmmt; import evictbench.suites.math500; "
        "print([m for m in ('torch', 'transformers', 'datasets', 'lm_eval', 'pandas', 'sympy', 'math_verify') "
        "if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert run.stdout.strip() == "[]"
