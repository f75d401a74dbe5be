"""SnapKV as published (decode=append) against its authors' code and kvpress' press."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ours import EQUAL, Run, largest_difference, run
from showing import showing
from torch import Tensor

from evictbench.policies.snapkv import SnapKV
from evictbench.policy import Step
from studies.authors import tiny_llama
from studies.authors.recording import read

AUTHORS = read("snapkv/snapkv.json")[1]

KVPRESS = read("snapkv/kvpress.json")[1]

TIE = 1e-9
"""Far below the distance of two votes that are not equal."""


class TiesAsTheirs(SnapKV):
    """Of equal votes, those of the entries that the authors' code kept are a trifle larger."""

    theirs: list[list[list[int]]]

    def score(self, step: Step) -> Tensor:
        score = super().score(step)
        for head, kept in enumerate(self.theirs[step.layer]):
            score[0, head] += TIE * torch.isin(step.positions.expand_as(score)[0, head], torch.tensor(kept))
        return score


def policy(case: dict[str, Any], pool: str, cls: type[SnapKV] = SnapKV, group: str = "mean") -> SnapKV:
    settings = {"window": case["window"], "kernel": case["kernel"], "pool": pool, "group": group}
    return cls(SnapKV.Config(**settings, decode="append"))


def of(kv_heads: set[int]) -> list[dict[str, Any]]:
    return [case for case in AUTHORS if case["kv_heads"] in kv_heads]


def check(ours: Run, case: dict[str, Any]) -> None:
    for seen, layers in case["kept"].items():
        assert ours.kept[int(seen)] == layers, seen
    assert largest_difference(ours.logits[case["prompt"] - 1 :], case["logits"]) < EQUAL


@pytest.mark.parametrize("case", of({4}), ids=lambda case: f"{case['pool']}, {case['prompt']} to {case['size']}")
def test_sets_votes_and_logits_are_the_authors(case: dict[str, Any]) -> None:
    """Both hold `size` entries after the prompt, beside the next query's own, and append the answer. Their pooling ends
    where the window begins, as ours does. A pool of the largest makes equal votes: of those we keep the earlier."""
    snapkv = policy(case, case["pool"], TiesAsTheirs)
    assert isinstance(snapkv, TiesAsTheirs)
    snapkv.theirs = case["kept"][str(case["prompt"])]
    scores = showing(snapkv)
    check(run(snapkv, case, case["size"], case["prompt"]), case)
    assert len(scores) == (tiny_llama.LAYERS if case["prompt"] > case["size"] else 0)
    for layer, heads in enumerate(scores):
        for head, shown in enumerate(heads):
            found = torch.tensor([shown[position] for position in range(case["prompt"] - case["window"])])
            assert largest_difference(found, case["votes"][layer][head]) < EQUAL


def test_equal_votes_are_the_only_difference() -> None:
    """Without the trifle, five sets of eight differ under a pool of the largest, by entries of equal votes."""
    case = of({4})[1]
    assert case["pool"] == "max"
    kept = run(policy(case, "max"), case, case["size"], case["prompt"]).kept[case["prompt"]]
    theirs, swapped = case["kept"][str(case["prompt"])], []
    for layer in range(tiny_llama.LAYERS):
        for head, votes in enumerate(case["votes"][layer]):
            mine, other = set(kept[layer][head]), set(theirs[layer][head])
            assert {votes[position] for position in mine - other} == {votes[position] for position in other - mine}
            swapped.append(len(mine - other))
    assert swapped == [1, 1, 0, 2, 0, 2, 0, 2]


@pytest.mark.parametrize(
    ("pool", "group", "lost", "logits"),
    [("avg", "mean", 26, 2.845), ("avg", "max", 27, 2.854), ("max", "mean", 35, 2.443), ("max", "max", 36, 1.536)],
)
def test_a_set_for_each_query_head_is_not_ours(pool: str, group: str, lost: int, logits: float) -> None:
    """Under grouped queries the authors store each query head's own entries, keys and values repeated; ours is one set
    for a KV head. Where pooling and the group's reduction may change places, it is the best of their reduced votes."""
    (case,) = [case for case in of({2}) if case["pool"] == pool]
    ours = run(policy(case, pool, group=group), case, case["size"], case["prompt"])
    prefix = case["prompt"] - case["window"]
    found = 0
    for layer in range(tiny_llama.LAYERS):
        votes = torch.tensor(case["votes"][layer], dtype=torch.float64).view(case["kv_heads"], -1, prefix)
        for head, mine in enumerate(ours.kept[case["prompt"]][layer]):
            if (pool, group) in (("avg", "mean"), ("max", "max")):
                reduced = votes[head].mean(0) if group == "mean" else votes[head].amax(0)
                least = reduced.topk(case["size"] - case["window"]).values.min()
                assert all(reduced[position] >= least - TIE for position in mine if position < prefix)
            for theirs in case["kept"][str(case["prompt"])][layer][2 * head : 2 * head + 2]:
                found += len(set(theirs) - set(mine))
    assert found == lost
    assert largest_difference(ours.logits[case["prompt"] :], case["logits"][1:]) == pytest.approx(logits, rel=1e-3)


@pytest.mark.parametrize("case", KVPRESS, ids=lambda case: f"{case['kv_heads']} KV heads, {case['attention']}")
def test_kvpress_press_is_ours_with_average_pooling(case: dict[str, Any]) -> None:
    """Sets at the prompt's end, and the logits of the answer, which both append: the mean over a KV head's group."""
    check(run(policy(case, "avg"), case, case["size"], case["prompt"]), case)
