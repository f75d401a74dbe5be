"""What fonts, spacing and frames leave of an answer."""

from __future__ import annotations

import pytest

from evictbench.suites.typesetting import LONGEST, RULES, bare, closing_brace

CASES = [
    # text, what is left
    (r"\mathbf{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\mathbf{\mathbf{7}}", "7"),
    (r"\pi\mathbf{x}", r"\pi x"),
    (r"x^\mathbf{12}", "x^{12}"),
    (r"\mathbf{7", r"\mathbf{7"),
    (r"\textbf{even}", r"\text{even}"),
    (r"\textbf{\textit{7}}", "7"),
    (r"\textbf{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\textbf{$x + 1$}", "x + 1"),
    (r"\text{x-axis}", r"\text{x-axis}"),
    (r"\text{May 5}", r"\text{May 5}"),
    (r"{\rm cm}", r"\text{cm}"),
    (r"{\bf 7}", "7"),
    (r"\color{red}{7}", "7"),
    (r"{{(1, 2)}}", "(1, 2)"),
    (r"{1}, {2}", "{1}, {2}"),
    (r"\frac{1}{2}", r"\frac{1}{2}"),
    (r"\{1, 2\}", r"\{1, 2\}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"1 \\[1ex] 2", r"1 \\ 2"),
    (r"10,\! 080", "10,080"),
    (r"1 \\, 2", r"1 \\, 2"),
    (r"\mathbb{R}", r"\mathbb{R}"),
    (r"\colon", r"\colon"),
    (r"\large7", "7"),
    (r"\largest", r"\largest"),
    ("2*3", "2*3"),
    ("**7.**", "7"),
    ("", ""),
    ("$", ""),
]


@pytest.mark.parametrize(("text", "left"), CASES)
def test_table(text, left):
    assert bare(text) == left


def test_every_rule_says_what_it_is_for():
    assert all(rule.why and rule.pattern.pattern for rule in RULES)
    assert all(len(bare(rule.why)) <= LONGEST for rule in RULES)


@pytest.mark.parametrize(("text", "where"), [("{a{b}c}d", 6), ("{a", None), (r"{\}}", 3), ("{}", 1)])
def test_closing_brace(text, where):
    assert closing_brace(text, 1) == where
