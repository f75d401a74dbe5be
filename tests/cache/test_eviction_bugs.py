"""Bugs that other projects shipped in their eviction mechanics (A1 to A16), each with the test that finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from largest_tensor import LargestTensor
from torch import Tensor
from twin_comparison import forward, generate_padded

from evictbench.cache import attention
from evictbench.cache.base import KVCache
from evictbench.cache.kernels import attend_and_observe
from evictbench.cache.new_cache import new_cache
from evictbench.cache.slots import signals
from evictbench.errors import UserError
from evictbench.generation.generator import Generator, Request
from evictbench.policies.full import Full
from evictbench.policies.h2o import H2O
from evictbench.policies.random import Random
from evictbench.policies.snapkv import SnapKV
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policies.tova import TOVA
from evictbench.policy import Policy, Step, reduce_group
from evictbench.policy.budget import Budget
from twin import tiny_model

pytestmark = pytest.mark.engine

BUDGET = 24


def small_policies() -> list[Policy]:
    """Every policy that takes a budget, with settings that leave room to choose at BUDGET."""
    return [
        Random(Random.Config(recent=8)),
        StreamingLLM(),
        StreamingLLM(StreamingLLM.Config(positions="original")),
        TOVA(),
        H2O(),
        H2O(H2O.Config(group="max")),
        SnapKV(SnapKV.Config(window=4, kernel=3, decode="reselect")),
    ]


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def eager_attentions(model: Any, tokens: list[int]) -> list[Tensor]:
    """Every layer's full softmax matrix `[1, heads, queries, keys]`, from transformers' own eager attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(input_ids=torch.tensor([tokens]), output_attentions=True).attentions
    attention.use(model)
    return list(attentions)


def decode(model: Any, cache: KVCache, token: int, steps: int) -> list[int]:
    tokens = []
    for _ in range(steps):
        token = int(forward(model, cache, [token])[-1].argmax())
        tokens.append(token)
    return tokens


class NoText:
    """The part of a tokenizer that generation needs."""

    eos_token_id = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))


def answers(
    model: Any, policy: Policy, prompts: list[list[int]], batch_size: int = 1, **settings: Any
) -> dict[int, Any]:
    model.generation_config.eos_token_id = None
    budget = Budget(tokens=BUDGET) if policy.needs_budget else None
    generator = Generator(model, NoText(), policy, budget, batch_size=batch_size, chunk=7, **settings)  # type: ignore[arg-type]
    requests = [Request(index, tuple(tokens), None, 12) for index, tokens in enumerate(prompts)]
    return {completion.key: completion for completion in generator.run(requests)}


@pytest.mark.parametrize("policy", small_policies(), ids=lambda policy: policy.name)
def test_a1_every_sample_is_compressed(policy: Policy) -> None:
    model = tiny_model()
    prompts = [prompt(40, seed) for seed in range(3)]
    together = answers(model, policy, prompts)
    for completion in together.values():
        assert 0 < completion.occupancy_max <= BUDGET
    assert answers(model, policy, [prompts[2]])[0].tokens == together[2].tokens


@pytest.mark.parametrize("policy", small_policies(), ids=lambda policy: policy.name)
def test_a2_nothing_leaks_from_policy_to_policy_or_out_of_an_exception(policy: Policy) -> None:
    model = tiny_model()
    alone = answers(model, policy, [prompt(40)])[0].tokens
    answers(model, H2O(), [prompt(50, 1)])
    assert answers(model, policy, [prompt(40)])[0].tokens == alone

    cache = new_cache(model, policy, BUDGET)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("boom")

    handle = model.model.layers[0].mlp.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="boom"):
        forward(model, cache, prompt(30))
    handle.remove()
    with pytest.raises(RuntimeError, match="did not finish"):
        forward(model, cache, prompt(30))
    assert answers(model, policy, [prompt(40)])[0].tokens == alone
    cache.reset()
    again, fresh = forward(model, cache, prompt(40)), forward(model, new_cache(model, policy, BUDGET), prompt(40))
    torch.testing.assert_close(again, fresh, atol=0, rtol=0)


@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_a3_streaming_llm_holds_exactly_the_sinks_and_the_last(chunk: int) -> None:
    model = tiny_model()
    cache = new_cache(model, StreamingLLM(), BUDGET, prompt_length=40)
    tokens = prompt(40)
    for start in range(0, 40, chunk):
        forward(model, cache, tokens[start : start + chunk])
    for _ in range(100):
        seen = cache.seen[0]
        expected = [0, 1, 2, 3, *range(seen - (BUDGET - 1 - 4), seen)]
        for layer in range(cache.shape.layers):
            assert cache.kept(layer).tolist() == [expected]
        forward(model, cache, [seen % 97])


def test_a4_window_probabilities_are_those_of_full_attention() -> None:
    shown: dict[int, Tensor] = {}

    class Watched(SnapKV):
        def observe(self, step: Step) -> None:
            assert step.signals.window_probs is not None
            shown[step.layer] = step.signals.window_probs().flatten(1, 2)[0]

    model, tokens = tiny_model("qwen3"), prompt(30)
    cache = new_cache(model, Watched(SnapKV.Config(window=6, kernel=3, decode="reselect", votes="window")), 200)
    forward(model, cache, tokens[:21])
    for token in tokens[21:]:
        forward(model, cache, [token])
    for layer, probs in enumerate(eager_attentions(model, tokens)):
        torch.testing.assert_close(shown[layer], probs[0, :, -6:].double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [1, 8, 16])
def test_a5_only_relative_positions_matter(chunk: int) -> None:
    """One layer, recent tokens only: at the end it must look as if the suffix had been read alone."""
    model = tiny_model(layers=1)
    tokens = prompt(48)
    cache = new_cache(model, StreamingLLM(StreamingLLM.Config(sinks=0)), 16, prompt_length=48)
    for start in range(0, 48, chunk):
        logits = forward(model, cache, tokens[start : start + chunk])
    alone = forward(model, new_cache(model, Full()), tokens[-16:])
    torch.testing.assert_close(logits[-1], alone[-1], atol=1e-9, rtol=0)


@pytest.mark.parametrize("policy", small_policies(), ids=lambda policy: policy.name)
def test_a6_chunked_prefill_within_the_budget_is_one_shot_prefill(policy: Policy) -> None:
    model, tokens = tiny_model(), prompt(40)
    whole = forward(model, new_cache(model, Full()), tokens)
    for size in (1, 3, 16):
        cache = new_cache(model, policy, 100, prefill="bounded", prompt_length=40)
        parts = [forward(model, cache, tokens[start : start + size]) for start in range(0, 40, size)]
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("policy", [Full(), *small_policies()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("chunk", [None, 8])
def test_a7_a_left_padded_batch_equals_its_rows_alone(policy: Policy, chunk: int | None) -> None:
    model = tiny_model()
    prompts = [prompt(length, row) for row, length in enumerate((40, 29, 3))]
    options: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": None}

    def cache_for(length: int) -> KVCache:
        budget = BUDGET if policy.needs_budget else None
        return new_cache(model, policy, budget, prompt_length=length)

    answers = generate_padded(model, cache_for(40), prompts, prefill_chunk_size=chunk, **options)
    for row, tokens in enumerate(prompts):
        alone = generate_padded(model, cache_for(len(tokens)), [tokens], **options)
        assert alone == [answers[row]], f"row of {len(tokens)}"


@pytest.mark.parametrize("policy", small_policies(), ids=lambda policy: policy.name)
def test_a8_keys_are_cached_once_per_kv_head(policy: Policy) -> None:
    """Bytes are the slots' and the declared state's, to the byte."""
    model = tiny_model(groups=3)
    cache = new_cache(model, policy, BUDGET)
    decode(model, cache, int(forward(model, cache, prompt(60))[-1].argmax()), 5)
    shape, slots = cache.shape, cache.charge.slots(BUDGET)
    sets = {"head": shape.kv_heads, "layer": 1, "model": 1}[policy.granularity]
    placements = 1 if policy.granularity == "model" else shape.layers
    expected = 2 * shape.layers * shape.kv_heads * slots * shape.head_dim * 8
    expected += placements * sets * (slots * 4 + 8)
    for tensor in policy.slot_state(shape).values():
        expected += shape.layers * shape.kv_heads * slots * max(1, tensor.width) * tensor.dtype.itemsize
    if policy.window_in_decode:
        expected += shape.layers * shape.heads * policy.window * shape.head_dim * 8
    if policy.reindexed_sinks:
        expected += shape.layers * shape.kv_heads * policy.sinks * shape.head_dim * 8
    assert cache.nbytes() == expected


def test_a9_the_group_reduction_is_stated_and_matters() -> None:
    probs = torch.tensor([[[[0.9, 0.05, 0.05], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]]])
    assert reduce_group(probs, "mean").argmax() == 1
    assert reduce_group(probs, "max").argmax() == 0
    model, tokens = tiny_model(groups=3), prompt(60)
    kept = {}
    for group in ("mean", "max"):
        cache = new_cache(model, H2O(H2O.Config(group=group)), BUDGET)
        forward(model, cache, tokens)
        kept[group] = [cache.kept(layer).tolist() for layer in range(cache.shape.layers)]
    assert kept["mean"] != kept["max"]


@pytest.mark.parametrize("chunk", [48, 5])
def test_a10_accumulated_attention_is_causal(chunk: int) -> None:
    model, tokens = tiny_model(), prompt(48)
    cache = new_cache(model, H2O(H2O.Config(group="sum")), 100, prompt_length=48)
    for start in range(0, 48, chunk):
        forward(model, cache, tokens[start : start + chunk])
    for layer, probs in zip(cache.layers, eager_attentions(model, tokens), strict=True):
        expected = probs[0].sum(1).view(2, 2, 48).sum(1)
        torch.testing.assert_close(layer.buffers["mass"][0, :, :48].double(), expected.double(), atol=1e-5, rtol=0)


def test_a11_each_layer_and_kv_head_has_its_own_sum() -> None:
    """One layer's attention must not reach the next one's sum: two layers with other weights keep other sets."""
    model = tiny_model(layers=3)
    cache = new_cache(model, H2O(), BUDGET)
    forward(model, cache, prompt(60))
    kept = [tuple(map(tuple, cache.kept(layer).tolist())) for layer in range(3)]
    assert len(set(kept)) == 3
    assert all(len(set(heads)) == 2 for heads in kept)
    sums = [layer.buffers["mass"].sum().item() for layer in cache.layers]
    assert max(sums) <= 60 * 2 + 1e-6


@pytest.mark.parametrize("length", [1, 2, BUDGET, 60])
@pytest.mark.parametrize("policy", small_policies(), ids=lambda policy: policy.name)
def test_a12_protected_tokens_survive_equal_scores(
    policy: Policy, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = policy.keep(BUDGET, "decode") == BUDGET - 1
    if not policy.static and one_by_one:
        monkeypatch.setattr(policy, "score", lambda step: torch.zeros(step.positions.shape))
    model = tiny_model()
    cache = new_cache(model, policy, BUDGET)
    forward(model, cache, prompt(length))
    decode(model, cache, 1, 5)
    seen = cache.seen[0]
    held = min(seen, cache.rows[0].held)
    assert held >= 1
    for layer in range(cache.shape.layers):
        for kept in cache.kept(layer).tolist():
            assert len(kept) == held
            assert set(range(min(policy.sinks, seen))) <= set(kept)
            recent = int(policy.recent(BUDGET)) - 1
            assert set(range(max(0, seen - recent), seen)) <= set(kept) or recent <= 0
            if not policy.static and one_by_one and recent <= 0:
                assert kept == list(range(held)), "ties keep the earlier position"


def test_a12_budget_of_one() -> None:
    model = tiny_model()
    cache = new_cache(model, TOVA(), 1)
    forward(model, cache, prompt(10))
    decode(model, cache, 1, 4)
    assert cache.rows[0].occupancy.largest == 1


@pytest.mark.parametrize("budget", ["40", "60%"])
@pytest.mark.parametrize("policy", small_policies(), ids=lambda policy: policy.name)
def test_a13_one_meaning_of_budget(policy: Policy, budget: str) -> None:
    model = tiny_model()
    cache = new_cache(model, policy, budget)
    decode(model, cache, int(forward(model, cache, prompt(70))[-1].argmax()), 30)
    largest = 40 if budget == "40" else 60
    interval = 1 if policy.keep(64, "decode") == 63 else 5
    assert largest - interval < cache.rows[0].occupancy.largest <= largest
    assert cache.rows[0].occupancy.total / cache.rows[0].occupancy.steps > 0.85 * (40 if budget == "40" else 42)


@pytest.mark.parametrize("policy", [StreamingLLM, TOVA, H2O])
def test_a13_budgets_that_protect_everything_are_refused(policy: type[Policy]) -> None:
    model = tiny_model()
    with pytest.raises(UserError, match="budget"):
        new_cache(model, policy(), 0)
    with pytest.raises(UserError, match="at least 5"):
        new_cache(model, StreamingLLM(), 4)
    with pytest.raises(UserError, match="at least 37"):
        new_cache(model, Random(), 36)


@pytest.mark.parametrize("policy", [Full(), *small_policies()], ids=lambda policy: policy.name)
def test_a14_reported_occupancy_is_what_attention_read(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    read: list[int] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def spy(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(query: Tensor, keys: Tensor, *args: Any, **kwargs: Any) -> Any:
            if query.shape[2] == 1:
                read.append(keys.shape[2])
            return function(query, keys, *args, **kwargs)

        return wrapped

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy(plain))
    for name in ("attend_one", "attend_and_observe"):
        monkeypatch.setattr(signals, name, spy(getattr(signals, name)))
    cache = new_cache(model, policy, BUDGET if policy.needs_budget else None)
    decode(model, cache, int(forward(model, cache, prompt(40))[-1].argmax()), 20)
    occupancy = cache.rows[0].occupancy
    assert len(read) == 20 * cache.shape.layers
    assert occupancy.largest == cache.charge.cost(max(read))
    mean = sum(read) / len(read)
    assert occupancy.total / occupancy.steps == cache.charge.fixed + mean * (1 + cache.charge.per_entry)


@pytest.mark.parametrize("policy", small_policies(), ids=lambda policy: policy.name)
def test_a15_evicted_bytes_are_freed(policy: Policy) -> None:
    model = tiny_model()
    full = new_cache(model, Full())
    forward(model, full, prompt(400))
    cache = new_cache(model, policy, BUDGET)
    forward(model, cache, prompt(400))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in [*layer.buffers.values(), *([layer.last_queries] if layer.last_queries is not None else [])]
    }
    assert sum(storages.values()) < 0.12 * full.nbytes()
    assert cache.nbytes() >= sum(storages.values())
    before = cache.nbytes()
    decode(model, cache, 1, 40)
    assert cache.nbytes() <= before * 1.2


def largest(policy: Policy, length: int, prefill: str, chunk: int) -> int:
    model, tokens = tiny_model(), prompt(length)
    cache = new_cache(model, policy, BUDGET, prefill=prefill, prompt_length=length)  # type: ignore[arg-type]
    with LargestTensor() as mode:
        for start in range(0, length, chunk):
            forward(model, cache, tokens[start : start + chunk])
    return mode.elements


@pytest.mark.parametrize("policy", small_policies(), ids=lambda policy: policy.name)
def test_a16_no_tensor_is_the_prompt_squared(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attend_and_observe.__globals__["TILE_ELEMENTS"], "cpu", 2**12)
    sizes = [largest(policy, length, "dense", 64) for length in (512, 1024, 2048)]
    assert sizes[2] <= 2.2 * sizes[1] <= 2.2**2 * sizes[0]
    assert sizes[2] < 2048 * 2048 / 4
    bounded = [largest(policy, length, "bounded", 64) for length in (512, 1024, 2048)]
    assert bounded[0] == bounded[1] == bounded[2]
