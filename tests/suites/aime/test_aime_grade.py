"""AIME's grader: a table of gold, response and whether it is right."""

from __future__ import annotations

import pytest

from evictbench.errors import UserError
from evictbench.suites.aime.grade import integer, process_results
from evictbench.suites.aime.problems import gold

CASES = [
    # gold as in a file, response, right
    ("25", r"\boxed{25}", True),
    ("025", r"\boxed{25}", True),  # seven golds of 2024 are written so
    ("70", r"\boxed{070}", True),
    ("070", r"\boxed{70}", True),
    ("0", r"\boxed{000}", True),
    ("336^\\circ", r"\boxed{336}", True),  # as one copy has an answer of 2025
    ("336", r"\boxed{336^\circ}", True),
    ("336", r"\boxed{336^{\circ}}", True),
    ("336", r"\boxed{336°}", True),
    ("336", r"\boxed{336 \text{ degrees}}", True),
    ("4", r"\boxed{3}, or rather \boxed{4}", True),  # the last wins
    ("3", r"\boxed{3}, or rather \boxed{4}", False),
    ("3", r"\boxed{3", False),
    ("3", r"\boxed{", False),
    ("3", r"Then \boxed{3} holds; so \boxed{", True),  # the last that closes
    ("25", "Final answer: 25", False),  # no box, no answer
    ("25", "25", False),
    ("25", "$25$", False),
    ("25", "", False),  # what is left of an unclosed thought
    ("73", r"**73**", False),
    ("73", r"\boxed{**73**}", True),
    ("73", r"**\boxed{73}**", True),
    ("73", r"$$\boxed{73}$$", True),
    ("73", r"\boxed{$73$}", True),
    ("73", r"\boxed{\text{73}}", True),
    ("73", r"\boxed{\mathbf{073}}", True),
    ("73", r"\boxed{73.}", True),
    ("73", r"\boxed{73.0}", True),
    ("73", r"\boxed{73.5}", False),
    ("73", r"\boxed{m + n = 73}", True),
    ("73", r"\boxed{8^2 + 3^2 = 73}", True),
    ("73", r"\boxed{n \neq 73}", False),
    ("73", r"\boxed{n >= 73}", False),
    ("73", r"\boxed{-73}", False),
    ("73", r"\boxed{73\text{ cm}^2}", True),
    ("73", r"\boxed{73 \text{ or } 74}", False),
    ("73", r"\boxed{73, 74}", False),
    ("73", r"\boxed{7 3}", False),
    ("73", r"\boxed{73x}", False),
    ("73", r"\boxed{\frac{146}{2}}", False),  # nothing is computed
    ("32", r"\boxed{2^5}", False),
    ("100", r"\boxed{1{,}00}", False),
    ("336", r"\boxed{3,36}", False),
    ("8", r"\boxed{8} I put it within \boxed{}.", True),
    ("7", r"\boxed{\boxed{7}}", True),
    ("7", r"\boxed{\text{(B)}}", False),
]


@pytest.mark.parametrize(("answer", "response", "right"), CASES)
def test_table(answer, response, right):
    result = process_results({"answer": gold(answer, "here")}, [response])
    assert result["score"] == float(right)
    if right:
        assert result["answer"] == str(int(answer.removesuffix("^\\circ")))


def test_votes_and_boxes():
    doc = {"answer": 25}
    assert process_results(doc, [r"\boxed{0026}"]) == {"score": 0.0, "boxed": 1.0, "answer": "26"}
    assert process_results(doc, [r"\boxed{x+1}"]) == {"score": 0.0, "boxed": 1.0, "answer": "x+1"}
    assert process_results(doc, ["25"]) == {"score": 0.0, "boxed": 0.0, "answer": ""}
    assert process_results(doc, [r"\boxed{1{,}000}"])["answer"] == "1000"
    assert process_results(doc, [r"\boxed{1,\!000}"])["answer"] == "1000"
    assert process_results(doc, [r"\boxed{1\,000}"])["answer"] == "1000"


def test_digits_beyond_measure_are_no_answer():
    assert integer("9" * 100_000) is None
    assert integer("٢٥") is None


@pytest.mark.parametrize("answer", ["1000", "-1", "2.5", "x", "['70']", ""])
def test_a_gold_that_is_no_integer_of_aime_is_refused(answer):
    with pytest.raises(UserError, match=r"aime24.jsonl: record 3: .*not an integer from 0 to 999"):
        gold(answer, "aime24.jsonl: record 3")
