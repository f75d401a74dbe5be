"""HMMT's data, prompts, grading and protocols, on problems made for these tests."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from evictbench.errors import UserError
from evictbench.evaluation.tasks import load_tasks, render, score
from evictbench.suite import Sampling, SuiteRequest
from evictbench.suites.hmmt import SUITE

# MathArena's columns, and those of other copies
FEBRUARY = [
    {
        "problem_idx": 1,
        "problem": "What is $1 \\div 8$?\nIn lowest terms.",
        "answer": "\\frac{1}{8}",
        "problem_type": [],
    },
    {
        "problem_idx": 2,
        "problem": "Which $x$ solve $x^2 - x - 1 = 0$?",
        "answer": "\\frac{1+\\sqrt{5}}{2}, \\frac{1-\\sqrt{5}}{2}",
    },
]
NOVEMBER = [
    {"question": "How many words of $4$ letters are there?", "answer": 456976},
    {"question": "In how many ways?", "answer": "2^{5} \\cdot 6!"},
    {"question": "Where?", "answer": "(1, 2), (3, 4)"},
]


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def request(folder, **changes) -> SuiteRequest:
    return SuiteRequest(tokenizer=None, chat=True, data_dir=folder, **changes)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "hmmt_feb_2025.jsonl", FEBRUARY)
    write(tmp_path / "hmmt" / "hmmt_nov25.jsonl", NOVEMBER)
    return tmp_path


def test_documents_prompts_and_versions(folder):
    prepared = SUITE.prepare(request(folder))
    assert prepared.tasks == ("hmmt_feb25", "hmmt_nov25")
    assert [d["answer"] for d in prepared.metadata["hmmt_problems"]["hmmt_nov25"]] == [
        *("456976", "2^{5} \\cdot 6!", "(1, 2), (3, 4)")
    ]
    assert prepared.data["hmmt_feb_2025.jsonl"].startswith("sha256:")
    assert prepared.data["hmmt/hmmt_nov25.jsonl"].startswith("sha256:")
    for package in ("math-verify", "antlr4-python3-runtime", "sympy"):  # verdicts depend on each of them
        assert prepared.data[package] == version(package)
    assert [sentence.partition(" are missing")[0] for sentence in prepared.warnings] == [
        "28 of the 30 documents of HMMT February 2025",
        "27 of the 30 documents of HMMT November 2025",
    ]
    tasks = load_tasks(SUITE, prepared)
    assert render(tasks["hmmt_feb25"], tasks["hmmt_feb25"].task_docs[0], None) == (
        "What is $1 \\div 8$?\nIn lowest terms.\n"
        "Please reason step by step, and put your final answer within \\boxed{}."
    )
    for task in tasks.values():
        assert task.VERSION == 1.0
        assert task.config.generation_kwargs["max_gen_toks"] == 32768
        assert task.config.generation_kwargs["until"] == []


@pytest.mark.parametrize(
    ("task", "number", "box", "right"),
    [
        ("hmmt_feb25", 0, "0.125", 1),
        ("hmmt_feb25", 0, "2^{-3}", 1),
        ("hmmt_feb25", 0, "\\frac{1}{7}", 0),
        ("hmmt_feb25", 1, "\\frac{1-\\sqrt5}{2}, \\frac{1+\\sqrt5}{2}", 1),
        ("hmmt_feb25", 1, "\\frac{1 + \\sqrt{5}}{2} \\text{ and } \\frac{1 - \\sqrt{5}}{2}", 1),
        ("hmmt_feb25", 1, "\\frac{1+\\sqrt5}{2}", 0),
        ("hmmt_feb25", 1, "\\frac{1 \\pm \\sqrt{5}}{2}", 0),  # as the card says
        ("hmmt_nov25", 0, "26^4", 1),
        ("hmmt_nov25", 0, "456{,}976", 1),
        ("hmmt_nov25", 1, "23040", 1),
        ("hmmt_nov25", 1, "6! \\cdot 32", 1),
        ("hmmt_nov25", 1, "2^5 \\cdot 5!", 0),
        ("hmmt_nov25", 2, "(3, 4), (1, 2)", 1),
        ("hmmt_nov25", 2, "(1, 2), (3, 5)", 0),
    ],
)
def test_answers_are_graded_as_those_of_math500(folder, task, number, box, right):
    graded = score(load_tasks(SUITE, SUITE.prepare(request(folder)))[task], number, f"So \\boxed{{{box}}}.")
    assert graded.score == right
    assert (graded.metrics["boxed"], graded.metrics["timed_out"]) == (1, 0)


def test_no_box_no_answer(folder):
    task = load_tasks(SUITE, SUITE.prepare(request(folder)))["hmmt_nov25"]
    assert score(task, 0, "The answer is 456976.").metrics == {"score": 0.0, "boxed": 0.0, "timed_out": 0.0}


def test_a_competition_that_is_not_there_is_left_out_with_a_sentence_or_refused_by_name(tmp_path):
    write(tmp_path / "hmmt_nov25.jsonl", NOVEMBER)
    prepared = SUITE.prepare(request(tmp_path))
    assert prepared.tasks == ("hmmt_nov25",)
    assert "no HMMT February 2025 data: looked for hmmt_feb25.jsonl" in prepared.skipped["hmmt_feb25"]
    with pytest.raises(UserError, match="no HMMT February 2025 data"):
        SUITE.prepare(request(tmp_path, tasks=("hmmt_feb25",)))
    (tmp_path / "hmmt_nov25.jsonl").rename(tmp_path / "train.jsonl")  # a name that does not say whose it is
    with pytest.raises(UserError, match="No task of hmmt can run"):
        SUITE.prepare(request(tmp_path))


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"answer": "1"}, r"hmmt_feb_2025.jsonl: record 3 has no problem \(a field problem, question, Problem or"),
        ({"problem": "x"}, r"hmmt_feb_2025.jsonl: record 3 has no answer \(a field answer or Answer\)"),
        ({"problem": "x", "answer": ["1", "2"]}, r"record 3: the field answer holds .*, and has to hold a text or a"),
        ({"problem": "x", "answer": "\\frac{1}{2"}, r"record 3: the braces of the answer .* do not balance"),
    ],
)
def test_broken_records_are_refused_even_in_the_default_set(folder, record, sentence):
    write(folder / "hmmt_feb_2025.jsonl", [*FEBRUARY, record])
    with pytest.raises(UserError, match=sentence):
        SUITE.prepare(request(folder))


def test_an_unknown_task_is_named(folder):
    with pytest.raises(UserError, match=r"Unknown task 'hmmt_feb24' of hmmt: did you mean hmmt_feb25"):
        SUITE.prepare(request(folder, tasks=("hmmt_feb24",)))


def test_what_lies_in_a_folder_is_surveyed(folder):
    found = SUITE.survey(folder)
    assert [(data.name, data.documents, data.known) for data in found] == [("hmmt_feb25", 2, 30), ("hmmt_nov25", 3, 30)]


def test_protocols():
    thinking, instruct = Sampling(0.6, 0.95, 20, 0.0), Sampling(0.7, 0.8, 20, 0.0)
    protocols = SUITE.protocols
    assert {name: (p.repeats, p.sampling, p.tasks) for name, p in protocols.items()} == {
        "default": (1, thinking, SUITE.tasks),
        "kvpop": (16, thinking, SUITE.tasks),
        "greedy": (1, Sampling(), SUITE.tasks),
    }
    assert all(p.source for p in protocols.values())
    assert protocols["kvpop"].sampling_for("Qwen/Qwen3-8B") == thinking
    assert protocols["kvpop"].sampling_for("Qwen/Qwen3-4B-Instruct-2507") == instruct
    assert protocols["default"].sampling_for("Qwen/Qwen3-4B-Instruct-2507") == thinking
