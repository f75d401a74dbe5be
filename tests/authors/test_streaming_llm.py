"""StreamingLLM against its authors' code: held positions and the logits of every token."""

from __future__ import annotations

from typing import Any

import pytest
from ours import EQUAL, largest_difference, run

from evictbench.policies.streaming_llm import StreamingLLM
from studies.authors.recording import read

CASES = read("streaming_llm/streaming_llm.json")[1]


@pytest.mark.parametrize("chunk", [1, 7, 44], ids="chunks of {}".format)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kv_heads']} KV heads, {case['recent']} recent")
def test_sets_and_logits_are_the_authors(case: dict[str, Any], chunk: int) -> None:
    """Their cache holds start + recent entries beside the next query's own, which our budget counts."""
    policy = StreamingLLM(StreamingLLM.Config(sinks=case["start"]))
    entries = case["start"] + case["recent"] + 1
    ours = run(policy, case, entries, prompt=case["tokens"], prefill="bounded", chunk=chunk)
    assert ours.kept[case["tokens"]] == case["kept"]
    assert largest_difference(ours.logits, case["logits"]) < EQUAL
    one_less = run(policy, case, entries - 1, prompt=case["tokens"], prefill="bounded", chunk=chunk)
    assert largest_difference(one_less.logits, case["logits"]) > 100 * EQUAL
