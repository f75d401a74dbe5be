"""MATH-500's grader: a table of gold, response and whether it is right; and what math-verify 0.9.0 takes for equal."""

from __future__ import annotations

import pytest

from evictbench.suites.math500 import grade, judge
from evictbench.suites.math500.grade import process_results
from evictbench.suites.math500.notation import plain, spelled
from evictbench.suites.typesetting import LONGEST

CASES = [
    # gold, response, right
    (r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", True),
    (r"\frac{1}{2}", r"\boxed{\dfrac12}", True),
    (r"\frac{1}{2}", r"\boxed{\frac 12}", True),
    (r"\frac{1}{2}", r"\boxed{0.5}", True),
    (r"\frac{1}{2}", r"\boxed{1/2}", True),
    (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", True),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", False),
    (r"\frac{1}{2}", r"\boxed{-\frac{1}{2}}", False),
    (r"\frac{1}{3}", r"\boxed{0.33}", False),
    ("25", r"\boxed{025}", True),
    ("070", r"\boxed{70}", True),
    (r"336^\circ", r"\boxed{336}", True),
    ("336", r"\boxed{336^\circ}", True),
    ("4", r"\boxed{3} is wrong, it is \boxed{4}", True),
    ("3", r"\boxed{3} is wrong, it is \boxed{4}", False),
    ("840", r"\boxed{840}, and once more \boxed{840}", True),  # not "840,840"
    ("4", r"\boxed{4", False),
    ("4", r"\boxed{", False),
    ("4", "", False),  # what is left of an unclosed thought
    ("4", "The answer is 4.", False),  # no box, no answer
    ("4", "$4$", False),
    ("73", "**73**", False),
    ("73", r"\boxed{**73**}", True),
    ("73", r"**\boxed{73}**", True),
    (r"\text{(B)}", r"\boxed{B}", True),
    (r"\text{(B)}", r"\boxed{\text{(B)}}", True),
    (r"\text{(B)}", r"\boxed{\text{(C)}}", False),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \frac{\pi}{2})}", True),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{\left(3,\pi/2\right)}", True),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(\frac{\pi}{2}, 3)}", False),
    ("1000", r"\boxed{1{,}000}", True),
    ("1000", r"\boxed{1,000}", True),
    (r"10,\!080", r"\boxed{10080}", True),
    (r"10,\!080", r"\boxed{10{,}080}", True),
    (r"\$32,\!348", r"\boxed{32348}", True),
    (r"5.4 \text{ cents}", r"\boxed{5.4}", True),
    (r"\text{Saturn}", r"\boxed{Saturn}", True),
    (r"\text{Saturn}", r"\boxed{\text{ Saturn }}", True),
    (r"\text{east}", r"\boxed{\text{seat}}", False),  # no product of letters
    (r"\text{May 5}", r"\boxed{May 5}", True),
    (r"\text{even}", r"\boxed{odd}", False),
    ("[1,2]", r"\boxed{(1,2)}", False),
    ("(1,2)", r"\boxed{(2,1)}", False),
    ("1,-2", r"\boxed{-2, 1}", True),
    ("1,-2", r"\boxed{1}", False),
    ("12", r"\boxed{12 \text{ or } 13}", False),
    ("12", r"\boxed{12, 13}", False),
    (r"(-\infty, 2) \cup (3, \infty)", r"\boxed{(3,\infty)\cup(-\infty,2)}", True),
    (r"x \in [-2,7]", r"\boxed{[-2,7]}", True),
    (r"3 \pm 2\sqrt{2}", r"\boxed{3 + 2\sqrt{2}, 3 - 2\sqrt{2}}", True),
    (r"3\sqrt{13}", r"\boxed{\sqrt{117}}", True),
    (r"\sqrt{2}", r"\boxed{1.41}", False),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
    ("6 - 5i", r"\boxed{-5i + 6}", True),
    ("6 - 5i", r"\boxed{6 + 5i}", False),
    ("y = 2x + 3", r"\boxed{y=2x+3}", True),
    ("11\\frac{1}{2}", r"\boxed{11.5}", True),
    (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}",
        True,
    ),
    (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}}",
        False,
    ),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{(1,2)}", False),
    ("12345678901234567890", r"\boxed{12345678901234567891}", False),
    ("3", r"\boxed{$3$.}", True),
    ("3", r"\boxed{\left\{3\right.}", False),
    ("3", r"\boxed{3} I put it within \boxed{}.", True),
]


@pytest.mark.parametrize(("gold", "response", "right"), CASES)
def test_table(gold, response, right):
    assert process_results({"answer": gold}, [response])["score"] == float(right)


LENIENT = [
    # gold, answer: equal to math-verify, and hardly to a mathematician. Should a version change its mind, the
    # version of the task changes with it.
    ("5", "y = 5"),
    ("7", "7 = 7"),
    ("7", "7, 7"),
    ("(1,2)", "1,2"),
    ("1,-2", "1,-2,1"),
    ("72", "72 km"),
    ("100", r"100\text{ m}^2"),
    ("y = 2x + 3", "2x + 3"),
    ("e", "E"),
    ("x", "X"),
    (r"\frac{1}{3}", "0.3333333333"),
    (r"\pi", "3.14159265359"),
]

STRICT = [
    # gold, answer: equal to a mathematician, and not to math-verify
    (r"(-\infty, 2) \cup (3, \infty)", r"x < 2 \text{ or } x > 3"),
    ("2k+1, k \\in \\mathbb{Z}", "2k+1"),
]


@pytest.mark.parametrize(
    ("gold", "answer", "equal"), [(*pair, True) for pair in LENIENT] + [(*pair, False) for pair in STRICT]
)
def test_what_math_verify_is_known_to_get_wrong(gold, answer, equal):
    assert judge.versions()["math-verify"] == "0.9.0"
    assert process_results({"answer": gold}, [f"\\boxed{{{answer}}}"])["score"] == float(equal)


def test_equal_answers_vote_together():
    def answer(text, gold):
        return process_results({"answer": gold}, [f"\\boxed{{{text}}}"])["answer"]

    right = {answer(text, r"\frac{1}{2}") for text in (r"\frac{1}{2}", "0.5", "1/2", r"\dfrac12", r"\tfrac{2}{4}")}
    assert right == {r"\frac{1}{2}"}
    wrong = {answer(text, "3") for text in (r"\frac{1}{2}", "0.5", "1/2", r"\dfrac12")}
    assert wrong == {"1/2"}
    assert answer("4{,}000", "3") == answer("4000", "3") == "4000"
    assert process_results({"answer": "3"}, ["3"])["answer"] == ""


def test_the_same_text_is_equal_without_asking(monkeypatch):
    def never(gold, answer):
        raise AssertionError((gold, answer))

    monkeypatch.setattr(grade.judge, "compare", never)
    assert process_results({"answer": r"\left(3, \dfrac{1}{2}\right)"}, [r"\boxed{(3,\frac{1}{2})}"])["score"] == 1
    endless = process_results({"answer": "3"}, [f"\\boxed{{{'(' * LONGEST}1}}"])
    assert (endless["score"], endless["boxed"]) == (0, 1)
    assert len(endless["answer"]) == LONGEST


def test_a_comparison_that_takes_too_long_is_wrong_and_counted(monkeypatch):
    monkeypatch.setattr(grade.judge, "compare", lambda gold, answer: judge.Verdict(equal=False, timed_out=True))
    assert process_results({"answer": "3"}, [r"\boxed{9^{9^{9}}}"]) == {
        "score": 0.0,
        "boxed": 1.0,
        "timed_out": 1.0,
        "answer": "9^{9^{9}}",
    }


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        (r"\text{May 5}", "May 5", True),
        ("1 2", "12", False),
        (r"\leftarrow", "arrow", False),
        (r"\dfraction", r"\fraction", False),
        (r"\{1\}", "1", False),
        ("-3", "3", False),
        ("−3", "-3", True),
        ("0.5", "5", False),
        ("A", "a", False),
    ],
)
def test_plain(one, other, same):
    assert (plain(spelled(one)) == plain(spelled(other))) is same
