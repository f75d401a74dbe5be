"""What DistillCache holds: per query head only while a prompt is read whole, afterwards once for the whole model."""

from __future__ import annotations

from typing import Any

import pytest
from random_distillcache_weights import weights
from twin_comparison import forward

from evictbench.cache.base import KVCache
from evictbench.cache.new_cache import new_cache
from evictbench.policies.distillcache import DistillCache
from evictbench.policies.distillcache.features import RECENT
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policy import ModelShape, Policy
from twin.distillcache import random_ranker
from twin.tiny import random_tokens, tiny_model

LAYERS, KV_HEADS, GROUP, BUDGET, PROMPT = 3, 2, 3, 20, 60


def small_model() -> Any:
    return tiny_model("llama", 1, layers=LAYERS, kv_heads=KV_HEADS, groups=GROUP)


def read(policy: Policy, prefill: Any, chunk: int) -> KVCache:
    model = small_model()
    cache = new_cache(model, policy, BUDGET, prefill=prefill, prompt_length=PROMPT)
    tokens = random_tokens(PROMPT, 2)
    for start in range(0, PROMPT, chunk):
        forward(model, cache, tokens[start : start + chunk])
    return cache


def distillcache() -> DistillCache:
    policy = DistillCache()
    policy.use(weights(random_ranker(0)), ModelShape(LAYERS, KV_HEADS * GROUP, KV_HEADS, 16))
    return policy


@pytest.mark.parametrize("chunk", [PROMPT, 11])
@pytest.mark.parametrize("prefill", ["dense", "bounded"])
def test_after_the_prompt_its_state_is_the_model_s(prefill: Any, chunk: int) -> None:
    ours = read(distillcache(), prefill, chunk)
    plain = read(StreamingLLM(StreamingLLM.Config(positions="original")), prefill, chunk)
    assert ours.layers[0].capacity == plain.layers[0].capacity == BUDGET
    # norm and the ring for each slot, the entropies once.
    assert ours.nbytes() - plain.nbytes() == 4 * (BUDGET * (1 + RECENT) + RECENT)


def test_sums_of_each_head_are_held_for_a_dense_prompt_alone() -> None:
    per_head = 4 * LAYERS * KV_HEADS * GROUP
    peaks = {}
    for prefill in ("dense", "bounded"):
        ours, plain = (read(policy, prefill, 11) for policy in (distillcache(), StreamingLLM()))
        peaks[prefill] = ours.bytes_peak - plain.bytes_peak
    assert peaks["dense"] >= PROMPT * (per_head + 4 * RECENT)
    assert peaks["bounded"] < 2 * (BUDGET + 11) * 4 * (2 + RECENT)


def test_a_decode_cache_makes_room_for_none_of_it() -> None:
    policy, model = distillcache(), small_model()
    together = new_cache(model, policy, BUDGET, rows=2)
    for _ in range(2):
        together.admit(read(policy, "dense", 11))
    for layer in together.layers:
        assert sorted(layer.buffers) == ["keys", "values"]
    assert together.nbytes() == together.bytes_held
