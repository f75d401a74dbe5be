"""MATH-500's grader on every kind of answer: the table in math500_answers.py."""

from __future__ import annotations

import pytest
from math500_answers import BY_KIND

from evictbench.suites.math500.grade import process_results
from evictbench.suites.math500.notation import spelled


@pytest.mark.parametrize("kind", BY_KIND)
def test_table(kind):
    wrong = [
        (gold, answer, "should be right" if right else "should be wrong")
        for gold, answer, right in BY_KIND[kind]
        if process_results({"answer": gold}, [f"\\boxed{{{answer}}}"])["score"] != float(right)
    ]
    assert not wrong


def test_every_answer_in_one_notation_stays_as_it_is():
    answers = {spelled(answer) for rows in BY_KIND.values() for row in rows for answer in row[:2]}
    assert [answer for answer in answers if spelled(answer) != answer] == []
