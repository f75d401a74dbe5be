"""StreamingLLM against its authors' code and kvpress' press: held positions and logits."""

from __future__ import annotations

from typing import Any

import pytest
from ours import EQUAL, largest_difference, run

from evictbench.policies.streaming_llm import StreamingLLM
from studies.authors.recording import read

AUTHORS = read("streaming_llm/streaming_llm.json")[1]

KVPRESS = read("streaming_llm/kvpress.json")[1]


@pytest.mark.parametrize(
    ("case", "chunk"),
    zip(AUTHORS, (7, 44, 1), strict=True),
    ids=lambda value: f"chunks of {value}" if isinstance(value, int) else f"{value['kv_heads']} KV heads",
)
def test_sets_and_logits_are_the_authors(case: dict[str, Any], chunk: int) -> None:
    """Their cache holds start + recent entries beside the next query's own, which our budget counts."""
    policy = StreamingLLM(StreamingLLM.Config(sinks=case["start"]))
    entries = case["start"] + case["recent"] + 1
    ours = run(policy, case, entries, prompt=case["tokens"], prefill="bounded", chunk=chunk)
    assert ours.kept[case["tokens"]] == case["kept"]
    assert largest_difference(ours.logits, case["logits"]) < EQUAL
    one_less = run(policy, case, entries - 1, prompt=case["tokens"], prefill="bounded")
    assert largest_difference(one_less.logits, case["logits"]) > 1000 * EQUAL


@pytest.mark.parametrize("case", KVPRESS, ids=lambda case: "rotated" if case["rotated"] else "original positions")
def test_kvpress_agrees_until_its_cache_grows(case: dict[str, Any]) -> None:
    """The prompt is read densely and cut once; the token behind it sees the same entries, and then theirs all stay."""
    positions = "reindexed" if case["rotated"] else "original"
    policy = StreamingLLM(StreamingLLM.Config(sinks=case["sinks"], positions=positions))
    ours = run(policy, case, case["size"] + 1, case["prompt"], prefill="dense")
    assert ours.kept[case["prompt"]] == case["kept"][str(case["prompt"])]
    after = ours.logits[case["prompt"] - 1 :]
    assert largest_difference(after[:2], case["logits"][:2]) < EQUAL
    assert largest_difference(after[2:3], case["logits"][2:3]) > 1000 * EQUAL
