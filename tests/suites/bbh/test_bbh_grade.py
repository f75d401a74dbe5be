"""(target, response, score) of both graders, over every kind of answer."""

from __future__ import annotations

import pytest

from evictbench.suites.bbh import grade

COT = [
    # no last letter is lost, with or without a full stop
    ("False", "So the answer is False", 1),
    ("False", "So the answer is False.", 1),
    ("(B)", "So the answer is (B)", 1),
    ("(B)", "So the answer is (B).", 1),
    ("invalid", "So the answer is invalid", 1),
    ("24", "So the answer is 24", 1),
    ("] >", "So the answer is ] >", 1),
    ("] >", "So the answer is ] >.", 1),
    # options
    ("(B)", "So the answer is B.", 1),
    ("(B)", "So the answer is (b).", 1),
    ("(B)", "So the answer is B) the oar.", 1),
    ("(B)", "So the answer is (B) the oar, as in (A).", 1),
    ("(B)", "So the answer is option (B).", 1),
    ("(B)", "So the answer is the second one, (B).", 1),
    ("(B)", "So the answer is **(B)**.", 1),
    ("(B)", "So the answer is $\\boxed{\\text{(B)}}$.", 1),
    ("(B)", "The answer is (A). No: the answer is (B).", 1),
    ("(B)", "The answer is (B). No: the answer is (A).", 0),
    ("(B)", "So the answer is (A) or (B).", 0),
    ("(B)", "So the answer is (A), (B).", 0),
    ("(B)", "So the answer is (B) and (C).", 0),
    ("(B)", "So the answer is Better.", 0),
    ("(B)", "It must be (B).", 0),
    ("(B)", "So the answer is", 0),
    ("(B)", "", 0),
    # truths
    ("True", "So the answer is true.", 1),
    ("True", "So the answer is not True.", 0),
    ("Yes", "So the answer is Yes, she does.", 1),
    ("Yes", "So the answer is yes", 1),
    ("No", "So the answer is No", 1),
    ("No", "So the answer is Nothing.", 0),
    ("valid", "So the answer is invalid.", 0),
    ("invalid", "So the answer is valid.", 0),
    # numbers
    ("-50", "So the answer is -50.", 1),
    ("-50", "So the answer is \u221250.", 1),
    ("-50", "So the answer is 50.", 0),
    ("-11520", "So the answer is -11,520.", 1),
    ("24", "So the answer is 24.0.", 1),
    ("24", "So the answer is 24.5.", 0),
    ("0", "So the answer is -0.", 1),
    ("7", "So the answer is 007.", 1),
    ("7", "So the answer is " + "7" * 9000, 0),
    ("24", "So the answer is 30 - 6 = 24.", 1),
    ("8", "So the answer is 8 vegetables.", 1),
    ("8", "So the answer is 8 or 9.", 0),
    ("8", "So the answer is 18.", 0),
    # brackets
    ("} ] >", "So the answer is }]>.", 1),
    ("} ] >", "So the answer is `} ] >`.", 1),
    ("} ] >", "So the answer is } ].", 0),
    ("} ] >", "So the answer is the closing } ] >.", 0),
    # words
    ("barn it&t you've", "So the answer is barn it&t you've.", 1),
    ("barn it&t you've", "So the answer is barn, it&t, you\u2019ve", 1),
    ("barn it&t you've", "So the answer is ['barn', 'it&t', \"you've\"].", 1),
    ("barn it&t you've", "So the answer is it&t barn you've.", 0),
    ("barn it&t you've", "So the answer is barn it&t.", 0),
    ("Bells, Inc", "So the answer is Bells, Inc.", 1),
]

DIRECT = [
    ("False", " False", 1),
    ("False", " False.", 1),
    ("False", "\nFalse\n", 1),
    ("False", " Fals", 0),
    ("(B)", " (B)", 1),
    ("(B)", " (B) Lovely sun", 1),
    ("(B)", " B", 1),
    ("(B)", " (C)\n(B)", 0),
    ("(B)", " Both are fine.\nSo the answer is (B).", 1),
    ("-50", " -50", 1),
    ("8", " 8. That is all.", 1),
    ("8", " 8 9", 1),
    ("} ] >", " } ] >", 1),
    ("barn curl", " barn curl", 1),
    ("barn curl", " barn\ncurl", 0),
    ("yes", " Yes.", 1),
    ("yes", "", 0),
]


@pytest.mark.parametrize(("target", "response", "score"), COT)
def test_chain_of_thought(target, response, score):
    assert grade.chain_of_thought({"target": target}, [response])["score"] == score


@pytest.mark.parametrize(("target", "response", "score"), DIRECT)
def test_direct(target, response, score):
    assert grade.direct({"target": target}, [response])["score"] == score


def test_one_answer_in_several_spellings_is_one_answer():
    for target, spellings, answer in [
        ("(A)", ["(B)", "B.", "(b) the oar"], "(B)"),
        ("5", ["1,000", "1000.0 things"], "1000"),
        ("> >", ["]>", "] >."], "]>"),
        ("a b", ["c, d", "C d."], "c d"),
        ("Yes", ["no", "No, never"], "no"),
    ]:
        found = {grade.direct({"target": target}, [text])["answer"] for text in spellings}
        assert found == {answer}
    assert grade.chain_of_thought({"target": "(A)"}, ["no idea"]) == {"score": 0.0, "answer": ""}
