"""The last box that closes."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evictbench.suites.boxed import INSTRUCTION, last_boxed, prompt

CASES = [
    (r"\boxed{3}", "3"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"first \boxed{3}, no: \boxed{4}.", "4"),
    (r"\boxed{3} and then \boxed{4", "3"),
    (r"\boxed{4", None),
    (r"\boxed{", None),
    (r"\boxed{\frac{1}{2}", None),
    ("no box", None),
    ("", None),
    (r"\boxed", None),
    (r"\boxed 5", None),
    (r"\boxed {5}", "5"),
    ("\\boxed\n{5}", "5"),
    (r"\boxed{ 5 }", "5"),
    (r"\fbox{5}", "5"),
    (r"\boxedx{5}", None),
    (r"\boxed{\boxed{7}}", "7"),
    (r"\boxed{x = \boxed{7}}", "7"),
    (r"\boxed{8} I put it within \boxed{}.", "8"),
    (r"\boxed{} \boxed{ }", None),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
    (r"\boxed{a \\}", r"a \\"),
    (r"a stray { and \boxed{5}", "5"),
    (r"a stray } and \boxed{5} and } more", "5"),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("\\boxed{a\nb}", "a\nb"),
    (f"{INSTRUCTION} It is \\boxed{{9}}.", "9"),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_table(text, expected):
    assert last_boxed(text) == expected


def brute_force(text: str) -> str | None:
    """Each box from the last to the first, its braces counted character by character."""
    for opening in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth, index = 1, opening.end()
        while index < len(text) and depth:
            if text[index] == "\\":
                index += 1
            else:
                depth += {"{": 1, "}": -1}.get(text[index], 0)
            index += 1
        content = text[opening.end() : index - 1]
        if not depth and content.strip():
            return content.strip()
    return None


@given(st.lists(st.sampled_from(["\\boxed{", "\\boxed", "{", "}", "1", " ", "\\{", "\\}", "\\frac"])).map("".join))
def test_equals_the_definition(text):
    assert last_boxed(text) == brute_force(text)


def test_a_model_that_repeats_itself_is_read_in_one_pass():
    started = time.process_time()
    assert last_boxed("\\boxed{" * 50_000) is None
    assert last_boxed("\\boxed{1}" * 50_000) == "1"
    assert time.process_time() - started < 5


def test_prompt():
    assert prompt(" What is 1 + 1?\n") == (
        "What is 1 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
