"""TOVA against its authors' code: held positions after every token, scores and logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ours import EQUAL, largest_difference, run
from showing import showing

from evictbench.policies.tova import TOVA
from studies.authors.recording import read

CASES = read("tova/tova.json")[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kv_heads']} KV heads, {case['size']} entries")
def test_sets_scores_and_logits_are_the_authors(case: dict[str, Any]) -> None:
    """Their cache holds `size` entries beside the next query's own, which our budget counts."""
    policy = TOVA()
    scores = showing(policy)
    ours = run(policy, case, case["size"] + 1, case["prompt"])
    assert len(case["kept"]) == case["tokens"] - case["prompt"] + 1
    for seen, layers in case["kept"].items():
        assert ours.kept[int(seen)] == [[held] * case["kv_heads"] for held in layers], seen
    assert largest_difference(ours.logits[case["prompt"] - 1 :], case["logits"]) < EQUAL
    first, last = case["scores"].values()
    layers = len(first)
    for shown, theirs in zip((*scores[:layers], *scores[-layers:]), (*first, *last), strict=True):
        (found,) = shown
        assert largest_difference(torch.tensor([found[position] for position in sorted(found)]), theirs) < EQUAL
