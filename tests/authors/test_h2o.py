"""H2O against its authors' code: equal to the one that drops entries, and how far from the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ours import EQUAL, Run, largest_difference, run
from showing import showing

from evictbench.policies.h2o import H2O
from studies.authors import tiny_llama
from studies.authors.recording import read

CASES = [{**case, "kv_heads": tiny_llama.HEADS} for case in read("h2o/h2o.json")[1]]


def of(code: str) -> list[dict[str, Any]]:
    return [case for case in CASES if case["code"] == code]


def pairs(ours: Run, case: dict[str, Any]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Of every pass, layer and head: the tokens seen, our set and theirs."""
    for seen, layers in case["kept"].items():
        for layer, heads in enumerate(layers):
            for mine, theirs in zip(ours.kept[int(seen)][layer], heads, strict=True):
                yield int(seen), mine, theirs


def differing(ours: Run, case: dict[str, Any]) -> tuple[int, int]:
    """How many sets are not the authors', and how many were compared."""
    equal = [mine == theirs for _, mine, theirs in pairs(ours, case)]
    return equal.count(False), len(equal)


@pytest.mark.parametrize("case", of("real_drop")[:3], ids=lambda case: f"{case['heavy']} and {case['recent']}")
def test_sets_scores_and_logits_are_those_of_real_drop(case: dict[str, Any]) -> None:
    """Theirs holds heavy + recent entries beside the next query's own; ours counts that one, as the most recent."""
    policy = H2O()
    scores = showing(policy)
    entries = case["heavy"] + case["recent"] + 1
    ours = run(policy, case, entries, case["prompt"])
    assert policy.recent(entries) == case["recent"] + 1
    assert differing(ours, case) == (0, (case["tokens"] - case["prompt"] + 1) * tiny_llama.LAYERS * tiny_llama.HEADS)
    assert largest_difference(ours.logits[case["prompt"] - 1 :], case["logits"]) < EQUAL
    *_, theirs = case["scores"].values()
    for layer, heads in enumerate(theirs):
        for head, found in enumerate(heads):
            shown = scores[layer - len(theirs)][head]
            held = [shown[position] for position in ours.kept[case["tokens"]][layer][head]]
            assert largest_difference(torch.tensor(held), found) < EQUAL


def test_equal_halves_are_one_recent_entry_more_than_ours() -> None:
    (case,) = of("real_drop")[3:]
    assert case["heavy"] == case["recent"] == 8
    entries = case["heavy"] + case["recent"] + 1
    ours = run(H2O(), case, entries, case["prompt"])
    assert H2O().recent(entries) - 1 == case["recent"] - 1
    for seen, mine, theirs in pairs(ours, case):
        assert len(mine) == len(theirs)
        assert mine[-7:] == theirs[-7:]
        assert theirs[-8] == seen - 8
    assert differing(ours, case) == (102, 104)


def test_the_streaming_variant_rotates_in_the_cache() -> None:
    """The first cut is the same; what follows is seen at other distances."""
    (case,) = of("streaming")
    ours = run(H2O(), case, case["heavy"] + case["recent"] + 1, case["prompt"])
    assert ours.kept[case["prompt"]] == case["kept"][str(case["prompt"])]
    assert differing(ours, case) == (25, 104)
    assert largest_difference(ours.logits[case["prompt"] - 1 :], case["logits"]) == pytest.approx(3.735, rel=1e-3)


def test_masked_generation_passes_over_one_entry() -> None:
    """The entry that leaves the recent ones is hidden from one query, and may come back for the next; ours may keep it
    all along. Here the budget counts the query's own entry as ours does."""
    (case,) = of("masked")
    ours = run(H2O(), case, case["heavy"] + case["recent"], case["prompt"])
    assert differing(ours, case) == (3, 104)
    for seen, mine, theirs in pairs(ours, case):
        assert seen - case["recent"] not in theirs
        assert set(mine) - set(theirs) <= {seen - case["recent"]}
    assert largest_difference(ours.logits[case["prompt"] - 1 :], case["logits"]) == pytest.approx(0.00244, rel=1e-2)


def test_the_likelihood_code_looks_ahead() -> None:
    """Its heavy hitters are those of all queries of the text, later ones too, and the same for every query."""
    (case,) = of("likelihood")
    ours = run(H2O(), case, case["heavy"] + case["recent"] + 1, prompt=1)
    assert sum(len(set(theirs) - set(mine)) for _, mine, theirs in pairs(ours, case)) == 22
    assert sum(len(theirs) for _, _, theirs in pairs(ours, case)) == 144
    assert largest_difference(ours.logits, case["logits"]) == pytest.approx(2.378, rel=1e-3)
