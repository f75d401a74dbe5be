"""How overheads and lengths of answers are made out, on arms whose times are known."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.queue import shuffled_requests
from benchmarks.steps import medians_of_runs


class Told:
    """An arm whose steps take what they are told."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.times = seconds, list[float]()

    def step(self) -> None:
        self.times.append(self.seconds)


def test_an_arm_is_compared_with_the_base() -> None:
    arms = cast(Any, {"no policy": Told(2.0), "slow": Told(2.2)})
    ratios = medians_of_runs(arms, "no policy", runs=3, steps=4)
    assert ratios["no policy"] == 1
    assert ratios["slow"] == pytest.approx(1.1)
    assert len(arms["slow"].times) == 4, "a run's steps alone, without the warm ones"


def test_lengths_spread_from_the_shortest_to_the_longest_and_are_shuffled() -> None:
    lengths = [one.max_new_tokens for one in shuffled_requests(64, 8, 80, 16)]
    assert (min(lengths), max(lengths), len(lengths)) == (8, 80, 64)
    assert lengths != sorted(lengths)
    assert lengths == [one.max_new_tokens for one in shuffled_requests(64, 8, 80, 16)]
