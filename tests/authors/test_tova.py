"""TOVA against its authors' code, equal; and against kvpress' press, which keeps the newest entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ours import EQUAL, largest_difference, run
from showing import showing

from evictbench.policies.tova import TOVA
from studies.authors.recording import read

AUTHORS = read("tova/tova.json")[1]

KVPRESS = read("tova/kvpress.json")[1]


class KeepsTheNewest(TOVA):
    def recent(self, budget: Any) -> int:
        return 2  # the newest entry, and the next query's own


def of_kvpress(case: dict[str, Any]) -> str:
    return f"{case['kv_heads']} KV heads, {case['size']} entries, {case['attention']}"


@pytest.mark.parametrize("case", AUTHORS, ids=lambda case: f"{case['kv_heads']} KV heads, {case['size']} entries")
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


@pytest.mark.parametrize("case", KVPRESS, ids=of_kvpress)
def test_kvpress_is_tova_with_the_newest_entry_kept(case: dict[str, Any]) -> None:
    """With decoding presses at every token; without them until the cache grows, which is after the token behind the
    prompt."""
    ours = run(KeepsTheNewest(), case, case["size"] + 1, case["prompt"])
    assert len(case["kept"]) == (case["tokens"] - case["prompt"] + 1 if case["decoding"] else 1)
    for seen, layers in case["kept"].items():
        assert ours.kept[int(seen)] == layers
    count = len(case["logits"]) if case["decoding"] else 2
    after = ours.logits[case["prompt"] - 1 :]
    assert largest_difference(after[:count], case["logits"][:count]) < EQUAL
    if not case["decoding"]:
        assert largest_difference(after[count:], case["logits"][count:]) > 1000 * EQUAL


def test_ours_may_drop_the_newest_entry() -> None:
    """It does at the prompt's end in four of five tiny models, whose queries are random, of one in one layer."""
    differing = []
    for case in KVPRESS:
        kept = run(TOVA(), {**case, "tokens": case["prompt"]}, case["size"] + 1, case["prompt"]).kept[case["prompt"]]
        newest = case["prompt"] - 1
        for mine, theirs in zip(kept, case["kept"][str(newest + 1)], strict=True):
            for head, other in zip(mine, theirs, strict=True):
                assert set(other) - set(head) <= {newest}
        differing.append(sum(mine != theirs for mine, theirs in zip(kept, case["kept"][str(newest + 1)], strict=True)))
    assert differing == [2, 2, 1, 2, 0]
