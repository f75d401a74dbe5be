"""Where an answer ends: new turns and invented questions are cut off, the question asked and its solution are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evictbench.evaluation import tasks
from evictbench.suite import SuiteRequest
from evictbench.suites.answer_end import first_answer
from evictbench.suites.gsm8k import SUITE

ASKED = "A tram has 12 seats and 7 are taken.\nHow many are free?"

CUT = [
    "5 are free.\n#### 5|\n\nQuestion: A bus has 9 seats. How many?\n#### 9",
    "5 are free.|\n\nQ: There are 15 trees in the grove. How many?\nA: \\boxed{21}",
    "5|\nQUESTION: Another one.",
    "5|\n\n**Problem:** A mill grinds 500 sacks. \\boxed{500}",
    "5|\n### Question: And then?",
    "\\boxed{5}|\nUser: And of a bus with 9 seats?\nAssistant: \\boxed{9}",
    "\\boxed{5}|\n\nHuman: Thanks! What is 2 + 2?\n\nAssistant: \\boxed{4}",
    "\\boxed{5}|<|im_end|>\n<|im_start|>user\nNext.",
    "\\boxed{5}|\n<|im_start|>user\nNext.",
    "\\boxed{5}|</s> [INST] Next. [/INST] \\boxed{6}",
    "\\boxed{5}|<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nNext.",
    "\\boxed{5}|<end_of_turn>\n<start_of_turn>user\nNext.",
    "\\boxed{5}|\nuser\nA bus has 9 seats. How many?\nassistant\n\\boxed{9}",
    "### Response: \\boxed{5}|\n\n### Instruction:\nSolve another. \\boxed{6}",
    # The question asked is told again, then another one begins.
    f"Question: {ASKED}\nAnswer: \\boxed{{5}}|\n\nQuestion: A mill grinds 500 sacks.\nAnswer: \\boxed{{500}}",
    "5|\nQuestion:",
]

WHOLE = [
    "12 - 7 = 5, so \\boxed{5} seats are free.",
    "",
    " \n",
    f"Question: {ASKED}\nAnswer: 12 - 7 = \\boxed{{5}}",
    f"Let us see.\n\nQuestion: {ASKED}\n\nAnswer: \\boxed{{5}}",
    "**Problem:** a tram has 12 seats, and 7 are taken. How many?\n\n**Solution:** \\boxed{5}",
    "Question 1: How many are there? 12.\nQuestion 2: How many are left? 5.\n\\boxed{5}",
    "Let\nP: (0, 0)\nQ: (3, 4)\nThen \\boxed{5}.",
    "The question: how many are left? \\boxed{5}",
    "Every user: one seat.\nThe users are 7. \\boxed{5}",
    "Question: something else altogether, before anything is answered. \\boxed{5}",
    "<|im_start|>assistant\n\\boxed{5}",
    "a < b and s > t, so <b>5</b>. \\boxed{5}",
]


@pytest.mark.parametrize("marked", CUT)
def test_a_new_turn_or_question_ends_the_answer(marked):
    kept, rest = marked.split("|", 1)
    assert first_answer(kept + rest, ASKED).rstrip() == kept.rstrip()


@pytest.mark.parametrize("text", WHOLE)
def test_what_belongs_to_the_answer_stays(text):
    assert first_answer(text, ASKED) == text


@pytest.mark.parametrize("piece", ["</s>", "\nQ: x", f"\nQuestion: {ASKED}", "\n" + "#" * 50, "\nuser", "*" * 60])
def test_texts_that_repeat_for_ever_are_read_in_linear_time(piece):
    text = "5" + piece * (400_000 // len(piece))
    assert first_answer(text, ASKED).startswith("5")


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_cot8"])
@pytest.mark.parametrize(
    ("response", "score", "flexible"),
    [
        ("The answer is 5.\n\nQuestion: A bus has 9 seats.\nThe answer is 9.", 1.0, 1.0),
        ("5 are free.\n#### 5\n\nQuestion: A bus has 9 seats.\n#### 9", 1.0, 1.0),
        ("I cannot say.\n\nQuestion: A bus has 5 seats.\nThe answer is 5.", 0.0, 0.0),
        ("The answer is 4.\nUser: And now?\nAssistant: The answer is 5.", 0.0, 0.0),
        (f"Question: {ASKED}\nThe answer is 4. No: the answer is 5.", 1.0, 1.0),
        # Eight solved problems are shown to one task; one of them told again is not the question asked.
        ("The answer is 5.\nQuestion: There are 15 trees in the grove. The answer is 6.", 1.0, 1.0),
    ],
)
def test_gsm8k_grades_the_first_answer(tmp_path: Path, name: str, response: str, score: float, flexible: float):
    record = {"question": ASKED, "answer": "12-7=5\n#### 5"}
    (tmp_path / "test.jsonl").write_text(json.dumps(record))
    request = SuiteRequest(tokenizer=None, chat=False, tasks=(name,), data_dir=tmp_path)  # type: ignore[arg-type]
    task = tasks.load_tasks(SUITE, SUITE.prepare(request))[name]
    graded = tasks.score(task, 0, response)
    assert (graded.score, graded.metrics["flexible"]) == (score, flexible)
