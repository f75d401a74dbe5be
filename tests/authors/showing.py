"""Policies that show the scores by which they cut."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from evictbench.policy import Policy, Step

Scores = list[dict[int, float]]
"""Of each set of a layer the score of an entry by its position."""


def showing(policy: Policy) -> list[Scores]:
    """A list to which the policy adds its scores at every cut, layer by layer."""
    shown: list[Scores] = []
    score = policy.score

    def noted(step: Step) -> Tensor:
        found = score(step)
        if step.cuts:
            positions = step.positions.expand_as(found)[0].tolist()
            rows = zip(positions, found[0].tolist(), strict=True)
            shown.append([{p: s for p, s in zip(*row, strict=True) if p >= 0} for row in rows])
        return found

    target: Any = policy
    target.score = noted
    return shown
