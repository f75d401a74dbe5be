"""What scores what: gold, response, expected."""

from __future__ import annotations

import pytest

from evictbench.suites.ruler.grade import clean, score_all, score_part

ALL = [
    (["1234567"], "1234567", 1.0),
    (["1234567"], " The number is 1234567.", 1.0),
    (["1234567"], "12345678", 1.0),  # a substring counts, as upstream
    (["1234567"], "1,234,567", 0.0),
    (["1234567"], "", 0.0),
    (["ABCDE", "FGHIJ"], "abcde and nothing else", 0.5),
    (["ABCDE", "FGHIJ"], "FGHIJ ABCDE ABCDE", 1.0),
    (["a", "b", "c", "d"], "A, C", 0.5),
    (["one two"], "one\ntwo", 0.0),
    (["one\ntwo"], "one\ttwo", 1.0),  # control characters become newlines, they do not vanish
    (["ab"], "a\x00b", 0.0),
    (["Paris"], "<pad>PARIS\n\nQuestion: Rome?", 1.0),
]
PART = [
    (["308", "three hundred and eight", "308 points"], "They gave up 308.", 1.0),  # C4: one of three is enough
    (["Paris", "Lyon"], "lyon", 1.0),
    (["Paris", "Lyon"], "Paris and Lyon", 1.0),
    (["Paris", "Lyon"], "Nice", 0.0),
    (["Paris"], "", 0.0),
]


@pytest.mark.parametrize(("gold", "response", "expected"), ALL)
def test_all_is_the_fraction_found(gold, response, expected):
    assert score_all({"outputs": gold}, [response]) == {"score": expected}


@pytest.mark.parametrize(("gold", "response", "expected"), PART)
def test_c4_part_is_one_if_any_is_found(gold, response, expected):
    assert score_part({"outputs": gold}, [response]) == {"score": expected}


def test_b12_the_answer_prefix_is_not_scored():
    doc = {"outputs": ["1234567"], "gen_prefix": "The number is 1234567", "input": "1234567", "context": "1234567"}
    assert score_all(doc, ["I do not know."]) == {"score": 0.0}
    assert score_part(doc, ["I do not know."]) == {"score": 0.0}


def test_responses_are_stripped_and_control_characters_are_newlines():
    assert clean(" \x1f a\r\tb \x07\n") == "a\n\nb"
    assert clean("\x85über\x7f") == "über\x7f"


def test_no_answer_prefix_holds_an_answer(prepare):
    for samples in prepare(context=4096, limit=4).metadata["ruler_samples"].values():
        for doc in samples:
            assert score_part(doc, [doc["gen_prefix"]]) == {"score": 0.0}
            assert score_all(doc, [" ".join(doc["outputs"])]) == {"score": 1.0}
