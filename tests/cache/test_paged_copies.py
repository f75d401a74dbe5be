"""Copies of a cache in pages: after one context each goes on with a question of its own, as a fresh cache would."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from twin_comparison import forward, forward_in_parts, kept

from evictbench.cache.base import KVCache
from evictbench.cache.new_cache import new_cache
from evictbench.models.policy_weights import Weights
from evictbench.policies.dms import DMS
from evictbench.policies.dms import Settings as DMSSettings
from evictbench.policies.indexmem_pp import IndexMem
from evictbench.policies.indexmem_pp import Settings as IndexMemSettings
from evictbench.policies.indexmem_pp.scorer import Scorer
from evictbench.policy import ModelShape
from twin.tiny import random_tokens, tiny_model

pytestmark = pytest.mark.engine

CONTEXT = random_tokens(50, 1)
AFTER_CONTEXT = random_tokens(18, 2)
QUESTIONS = [random_tokens(7, 3), random_tokens(1, 4), random_tokens(30, 5)]
ANSWERS = [random_tokens(40, seed) for seed in (6, 7, 8)]
KINDS = ["dms", "indexmem_pp equal_share", "indexmem_pp bounded"]
WHOLE = [*KINDS, "indexmem_pp"]
"""The last one takes its context in one pass."""


class AtZero(DMS):
    """DMS with a threshold of 0 whatever the budget."""

    def allot(self, share: float, length: int) -> float:
        return 0.0


def fresh(kind: str) -> KVCache:
    """A new cache whose prompt is the context, with a policy of its own."""
    model = tiny_model("llama")
    if kind == "dms":
        policy = AtZero(DMSSettings(window=6, sinks=1, gate="borrowed"))
        return new_cache(model, policy, "50%", prompt_length=len(CONTEXT))
    shape, generator = ModelShape.of(model.config), torch.Generator().manual_seed(0)
    scorer = Scorer(model.config.hidden_size, 8, shape.kv_heads).state_dict()
    tensors = {name: torch.randn((2, *part.shape), generator=generator) / 2 for name, part in scorer.items()}
    indexmem = IndexMem(
        IndexMemSettings(sinks=2, window=4, centroids=3, prompt="equal_share" if "share" in kind else "divided")
    )
    indexmem.use(Weights(tensors, {}, "a test", "0"), shape)
    prefill: Any = "bounded" if "bounded" in kind else "native"
    return new_cache(model, indexmem, 26, prefill=prefill, prompt_length=len(CONTEXT))


def held(cache: KVCache) -> tuple[Any, ...]:
    """What can be told of a cache from outside."""
    positions = [[kept(cache, layer, head) for head in range(2)] for layer in range(2)]
    occupancy = cache.rows[0].occupancy
    return positions, cache.seen, cache.columns, cache.nbytes(), occupancy.steps, occupancy.largest, occupancy.total


def passes(cache: KVCache, question: list[int], answer: list[int]) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
    """Logits of a question in one chunk and of an answer token by token, with what is held after each pass."""
    for tokens in (question, *([token] for token in answer)):
        yield forward(tiny_model("llama"), cache, tokens), held(cache)


def same(ours: tuple[torch.Tensor, tuple[Any, ...]], wanted: tuple[torch.Tensor, tuple[Any, ...]]) -> None:
    torch.testing.assert_close(ours[0], wanted[0], atol=1e-12, rtol=0)
    assert ours[1] == wanted[1]


@pytest.mark.parametrize("decoded", [0, len(AFTER_CONTEXT)])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_go_on_as_fresh_caches_do(kind: str, decoded: int) -> None:
    model = tiny_model("llama")
    before = [*CONTEXT, *AFTER_CONTEXT[:decoded]]

    def read() -> KVCache:
        cache = fresh(kind)
        forward_in_parts(model, cache, before, [20, 20, 10])
        return cache

    cache = read()
    untouched = held(cache)
    assert sum(len(head) for layer in untouched[0] for head in layer) < 4 * len(before), "nothing was evicted"
    caches = [cache, deepcopy(cache), deepcopy(deepcopy(cache))]
    assert [held(one) for one in caches] == [untouched] * 3
    wanted = [passes(read(), *text) for text in zip(QUESTIONS, ANSWERS, strict=True)]
    ours = [passes(one, *text) for one, text in zip(caches, zip(QUESTIONS, ANSWERS, strict=True), strict=True)]
    for results in zip(*ours, *wanted, strict=True):  # a pass of each in turn
        for result, expected in zip(results[:3], results[3:], strict=True):
            same(result, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_in_the_middle_of_the_context(kind: str) -> None:
    model = tiny_model("llama")
    cache = fresh(kind)
    forward(model, cache, CONTEXT[:20])
    copied = deepcopy(cache)
    rests = [CONTEXT[20:], random_tokens(30, 9)]
    for one, rest in zip((cache, copied), rests, strict=True):
        text = [*CONTEXT[:20], *rest, *AFTER_CONTEXT]
        expected = forward_in_parts(model, fresh(kind), text, [20, 30])[20:]
        ours = forward_in_parts(model, one, text[20:], [30])
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_copy_outlives_its_original(kind: str) -> None:
    model = tiny_model("llama")
    cache, alone = fresh(kind), fresh(kind)
    for one in (cache, alone):
        forward_in_parts(model, one, [*CONTEXT, *AFTER_CONTEXT], [50])
    copied = deepcopy(cache)
    del cache, one
    gc.collect()
    others = [fresh(kind) for _ in range(5)]  # whose pools may lie where those of the original lay
    for other in others:
        forward_in_parts(model, other, CONTEXT, [50])
    for ours, wanted in zip(
        passes(copied, QUESTIONS[0], ANSWERS[0]), passes(alone, QUESTIONS[0], ANSWERS[0]), strict=True
    ):
        same(ours, wanted)
    copied.reset()
    assert copied.nbytes() == copied.bytes_held == 0
    text = [*CONTEXT, *QUESTIONS[0]]
    ours, expected = (forward_in_parts(model, one, text, [50]) for one in (copied, fresh(kind)))
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_is_free_as_soon_as_its_cache_is(kind: str) -> None:
    """Without waiting for the garbage collector, which knows nothing of the memory of a GPU."""
    model = tiny_model("llama")
    cache = fresh(kind)
    forward_in_parts(model, cache, [*CONTEXT, *AFTER_CONTEXT], [50])
    pools = [weakref.ref(layer.pool) for layer in cache.layers]
    gc.collect()
    gc.disable()
    try:
        del cache
        assert [pool() for pool in pools] == [None, None]
    finally:
        gc.enable()
