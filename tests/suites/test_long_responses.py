"""Responses of models that repeat themselves: every grader reads 100,000 characters in time that grows with the length.

A pattern that takes the square of it needs minutes for one of these; the bound is far from both.
"""

from __future__ import annotations

import time

import pytest

from evictbench.suites.aime import grade as aime
from evictbench.suites.bbh import grade as bbh
from evictbench.suites.gsm8k import grade as gsm8k
from evictbench.suites.longbench import grade as longbench
from evictbench.suites.math500 import grade as math500
from evictbench.suites.ruler import grade as ruler

LENGTH = 100_000
SECONDS = 20
REPEATED = (
    " ",
    "\n",
    "$",
    "**",
    "\\,",
    "{",
    "}",
    "\\text{",
    "\\boxed{",
    "1 ",
    "1,",
    "^",
    "(B)",
    "answer is ",
    "not ",
    "°",
)
AROUND = ("\\boxed{{1{}1}}", "So the answer is {}1.")

SUMMARY = {"answers": ["a b"], "cut": 0, "words": 1, "all_classes": ["a", "b"]}
GRADERS = {
    "aime": (aime.process_results, {"answer": 7}),
    "math500": (math500.process_results, {"answer": "7"}),
    "bbh, options": (bbh.chain_of_thought, {"target": "(A)"}),
    "bbh, numbers": (bbh.direct, {"target": "7"}),
    "bbh, truths": (bbh.direct, {"target": "True"}),
    "bbh, brackets": (bbh.direct, {"target": "} ]"}),
    "bbh, words": (bbh.direct, {"target": "a b"}),
    "gsm8k": (gsm8k.boxed, {"answer": "7"}),
    "longbench, f1": (longbench.f1, SUMMARY),
    "longbench, classification": (longbench.classification, SUMMARY),
    "longbench, count": (longbench.count, {**SUMMARY, "answers": ["7"]}),
    "ruler": (ruler.score_all, {"outputs": ["7x"]}),
}


@pytest.mark.parametrize("name", GRADERS)
def test_it_is_read_in_time(name, monkeypatch):
    monkeypatch.setattr(math500.judge, "compare", lambda gold, answer: math500.judge.Verdict(equal=False))
    grader, doc = GRADERS[name]
    started = time.process_time()
    for repeated in REPEATED:
        for around in AROUND:
            response = around.format(repeated * (LENGTH // len(repeated)))
            assert grader(doc, [response])["score"] in (0, 0.5, 1)
            assert time.process_time() - started < SECONDS, (repeated, around)


@pytest.mark.parametrize("opened", ["\\boxed{", "\\boxed{ "])
def test_boxes_in_boxes_are_read_in_time(opened):
    depth = LENGTH // len(opened)
    started = time.process_time()
    result = aime.process_results({"answer": 7}, [opened * depth + "7" + "}" * depth])
    assert result == {"score": 1.0, "boxed": 1.0, "answer": "7"}
    assert time.process_time() - started < SECONDS
