"""TOVA against its authors' code: held positions after every token, scores and logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ours import EQUAL, largest_difference, run
from torch import Tensor

from evictbench.policies.tova import TOVA
from evictbench.policy import Step
from studies.authors.recording import read

CASES = read("tova/tova.json")[1]


class Showing(TOVA):
    """scores: of each layer and cut, by the position of an entry."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[dict[int, float]] = []

    def score(self, step: Step) -> Tensor:
        score = super().score(step)
        if step.cuts:
            positions = step.positions[0, 0].tolist()
            found = zip(positions, score[0, 0].tolist(), strict=True)
            self.scores.append({position: number for position, number in found if position >= 0})
        return score


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kv_heads']} KV heads, {case['size']} entries")
def test_sets_scores_and_logits_are_the_authors(case: dict[str, Any]) -> None:
    """Their cache holds `size` entries beside the next query's own, which our budget counts."""
    policy = Showing()
    ours = run(policy, case, case["size"] + 1, case["prompt"])
    for seen, layers in case["kept"].items():
        for layer, held in enumerate(layers):
            assert ours.kept[int(seen)][layer] == [held] * case["kv_heads"], seen
    assert largest_difference(ours.logits[case["prompt"] - 1 :], case["logits"]) < EQUAL
    first, last = case["scores"].values()
    layers = len(first)
    for shown, theirs in zip((*policy.scores[:layers], *policy.scores[-layers:]), (*first, *last), strict=True):
        found = torch.tensor([number for _, number in sorted(shown.items())])
        assert largest_difference(found, theirs) < EQUAL
