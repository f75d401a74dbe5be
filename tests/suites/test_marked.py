"""Answers behind a marker: the sentence, the last first; what is rejected, and what is said in its place."""

from __future__ import annotations

import pytest

from evictbench.suites.marked import marked

CASES = [
    # text, answers
    ("So the answer is (B).", ["(B)"]),
    ("The answer is 5. Or: the answer is 6.", ["6", "5"]),
    ("Answer: 5", ["5"]),
    ("The answers are 5.", []),
    ("It is 5.", []),
    ("The answer is not 5.", [""]),
    ("The answer is 5. The answer is not 5.", ["", "5"]),
    ("The answer isn't 5.", [""]),
    ("The answer isn\u2019t 5.", [""]),
    ("The answer can't be 5.", [""]),
    ("The answer cannot be 5.", [""]),
    ("The answer can not be 5.", [""]),
    ("The answer should not be 5.", [""]),
    ("The answer won't be 5.", []),
    ("The answer is definitely not 5.", [""]),
    ("The answer is not 5 but 6.", ["6"]),
    ("The answer is not 5, but rather 6.", ["6"]),
    ("The answer isn't 5, it's 6.", ["6"]),
    ("The answer is not 5; it is not 6.", [""]),
    ("The answer is anything but 5.", [""]),
    ("The answer is not only 5 but also 6.", ["not only 5 but also 6"]),
    ("The answer is no.", ["no"]),
    ("The answer is nothing.", ["nothing"]),
    ("The answer is not-for-profit.", ["not-for-profit"]),
    ("The answer is no longer 5.", [""]),
    ("The answer could be 5.", []),
    ("I don't think the answer is 5.", [""]),
    ("I do not believe that the correct answer is 5.", [""]),
    ("It is not true that the answer is 5.", [""]),
    ("I doubt the answer is 5.", [""]),
    ("It is not 5. The answer is 6.", ["6"]),
    ("It is not 5, so the answer is 6.", ["6"]),
    ("The answer is 6. If the answer is 5, I would be wrong.", ["6"]),
    ("I wonder whether the answer is 5.", []),
    ("Suppose the answer is 5. Then the answer is 6.", ["6"]),
    ("I am not sure, but the answer is 5.", ["5"]),
]


@pytest.mark.parametrize(("text", "answers"), CASES)
def test_table(text, answers):
    assert list(marked(text)) == answers
