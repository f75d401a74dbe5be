"""(gold, response, score) of both graders; the answer that is compared over repeats; the flexible metric."""

from __future__ import annotations

import pytest

from evictbench.suites.gsm8k import grade
from evictbench.suites.gsm8k.numbers import last_number, number, spelled

BOXED = [
    ("18", r"16 - 7 = 9, and 9 * 2 = 18. \boxed{18}", 1),
    ("18", r"\boxed{18.00}", 1),
    ("18", r"\[\boxed{\$18}\]", 1),
    ("18", r"\boxed{18\text{ dollars}}", 1),
    ("18", r"\boxed{\text{18 dollars}}", 1),
    ("18", r"\boxed{9 \times 2 = 18}", 1),
    ("18", r"\boxed{x = 18}", 1),
    ("18", r"First \boxed{17}, no: \boxed{18}.", 1),
    ("18", r"First \boxed{18}, no: \boxed{17}.", 0),
    ("18", r"\boxed{18", 0),
    ("18", r"The answer is 18, so \boxed{18", 0),
    ("18", r"\boxed{\frac{36}{2}}", 1),
    ("18", r"\boxed{180}", 0),
    ("18", r"\boxed{1.8}", 0),
    ("18", r"\boxed{-18}", 0),
    ("18", r"\boxed{10, 18}", 0),
    ("18", r"\boxed{18 or 20}", 0),
    ("18", r"\boxed{18^2}", 0),
    ("18", r"\boxed{\text{eighteen}}", 0),
    ("18", "", 0),
    ("18", "She makes 18", 0),  # no box and no marker
    ("18", "The answer is 18.", 1),  # no box: a marker counts
    ("18", "**Answer:** $18", 1),
    ("18", "9 * 2 = 18\n#### 18", 1),
    ("18", r"I put it in \boxed{}: the answer is 18.", 1),
    ("1000", r"\boxed{1,000}", 1),
    ("1000", r"\boxed{1{,}000}", 1),
    ("1000", r"\boxed{1\,000}", 1),
    ("1450000", r"\boxed{\$1,450,000.00}", 1),
    ("-10", r"\boxed{-10}", 1),
    ("-10", "\\boxed{\u221210}", 1),
    ("-10", r"\boxed{-\$10}", 1),
    ("-10", r"\boxed{10}", 0),
    ("1/2", r"\boxed{\dfrac12}", 1),
    ("1/2", r"\boxed{0.5}", 1),
    ("5/2", r"\boxed{2\frac{1}{2}}", 1),
    ("5/2", r"\boxed{2 1/2 \text{ hours}}", 1),
    ("70", r"\boxed{70\%}", 1),
    ("12", r"\boxed{12\text{ m}^2}", 1),
    ("90", r"\boxed{90^\circ}", 1),
    ("5", r"\boxed{x5}", 0),
    ("5", r"\boxed{1/0}", 0),
]

CHAIN = [
    ("18", " She makes 9 * 2 = 18 dollars. The answer is 18.", 1),
    ("18", " The answer is $18.", 1),
    ("18", " The answer is 18", 1),
    ("18", " The answer is **18**.", 1),
    ("18", " So the answer is: 18 dollars a day.", 1),
    ("18", " THE ANSWER IS 18.", 1),
    ("18", " The answer is 18.00.", 1),
    ("18", " The answer is 9 x 2 = 18.", 1),
    ("18", " The answer is 17. Wait. The answer is 18.", 1),
    ("18", " The answer is 18. Wait. The answer is 17.", 0),
    ("18", " The answer is 18.\nThe answer is", 1),
    ("18", " The answer is 1. 8 remain.", 0),
    ("18", " The answer is unclear. 18 are left.", 0),
    ("18", " The answer is 18 or 20.", 0),
    ("18", " The answer is 180.", 0),
    ("18", " That leaves 18.", 0),
    ("18", " The answer is $\\boxed{18}$.", 1),
    ("18", " The answer is:\n\n$$\n18\n$$", 1),
    ("18", " The answer is \\$18.", 1),
    ("18", "\n#### 18", 1),
    ("18", "", 0),
    ("2125", " The answer is 2,125.", 1),
    ("2125", " The answer is 2125.", 1),
    ("2125", " The answer is 2,125 people.", 1),
    ("2125", " The answer is 2.125.", 0),
    ("-3", " The answer is -3.", 1),
    ("-3", " The answer is - 3.", 1),
    ("-3", " The answer is 20 - 23 = -3.", 1),
    ("1/2", " The answer is 1/2.", 1),
    ("1/2", " The answer is .5.", 1),
    ("5/4", " The answer is 1.25 gallons.", 1),
]


@pytest.mark.parametrize(("gold", "response", "score"), BOXED)
def test_zero_shot(gold, response, score):
    assert grade.boxed({"answer": gold}, [response])["score"] == score


@pytest.mark.parametrize(("gold", "response", "score"), CHAIN)
def test_chain_of_thought(gold, response, score):
    assert grade.chain_of_thought({"answer": gold}, [response])["score"] == score


def test_one_answer_in_several_spellings_is_one_answer():
    spellings = [r"\boxed{1,000}", r"\boxed{\$1000.00}", "The answer is 1000 dollars."]
    assert {grade.boxed({"answer": "7"}, [text])["answer"] for text in spellings} == {"1000"}
    assert grade.boxed({"answer": "7"}, ["no idea"])["answer"] == ""


def test_flexible_is_the_last_number_whatever_it_stands_for():
    found = grade.chain_of_thought({"answer": "18"}, [" She makes 18 dollars."])
    assert found == {"score": 0.0, "flexible": 1.0, "answer": ""}
    assert grade.chain_of_thought({"answer": "18"}, [" The answer is 18. (2 steps)"])["flexible"] == 0.0
    assert spelled(last_number("no number")) == ""
    assert last_number("16 - 7 = 9 and 5 - 3") == 3


def test_numbers_that_repeat_for_ever_are_read_in_linear_time():
    text = "The answer is " + "1, " * 50_000 + "\\boxed{" * 20_000
    assert grade.boxed({"answer": "1"}, [text])["score"] == 0.0
    assert grade.chain_of_thought({"answer": "1"}, ["the answer is " * 100_000 + "1"])["score"] == 1.0
    assert number("9" * 5000) is None
