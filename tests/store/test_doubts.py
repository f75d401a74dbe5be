"""A full cache at 0, or with answers that end where they begin, is remarked upon; a weak one is not."""

from __future__ import annotations

import pytest

from evictbench.store.doubts import doubts


def lines(count=20, right=0, tokens=40, limit=128, cut=0, task="samsum"):
    """`count` samples: the first `right` score 0.5, the last `cut` are cut off."""
    return [
        {
            "task": task,
            "score": 0.5 if i < right else 0.0,
            "output_tokens": tokens,
            "token_limit": limit,
            "truncated": i >= count - cut,
        }
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (lines(tokens=0), "20 of 20 answers of the full cache are wrong and at most one token long"),
        (lines(tokens=1, right=9), "11 of 20 answers of the full cache are wrong and at most one token long"),
        (lines(tokens=1, right=10), None),  # one-token answers that are right half the time
        (lines(tokens=1, right=20), None),
        (lines(), "the full cache scores 0 on all 20 samples"),
        (lines(cut=11), "11 of the answers are cut off by the token limit"),
        (lines(cut=10), "or the task is beyond it."),
        (lines(count=10), "the full cache scores 0 on all 10 samples"),
        (lines(count=9), None),
        (lines(count=9, tokens=0), None),
        (lines(right=1), None),
        (lines(tokens=1, limit=1, right=5), None),  # one token is all that is asked for
        ([], None),
    ],
)
def test_what_is_remarked_upon(samples, says):
    found = list(doubts(samples))
    assert len(found) == (says is not None)
    assert all(sentence.startswith("samsum: ") and says in sentence for sentence in found)


def test_each_task_by_itself():
    mixed = [*lines(task="a"), *lines(task="b", right=3), *lines(task="c", tokens=0)]
    assert [sentence[:2] for sentence in doubts(mixed)] == ["a:", "c:"]
