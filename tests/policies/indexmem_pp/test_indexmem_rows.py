"""IndexMem++ with its scorer: against the twin, whatever the chunks, and rows together as each alone."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from indexmem_cases import Case
from indexmem_engine import first_clusters
from torch import Tensor
from twin_comparison import check_rows_that_come_and_go, examples, forward, generate_padded, kept

from evictbench.cache.new_cache import new_cache
from evictbench.cache.paged.cache import PagedCache
from evictbench.cache.paged.centroids import RESIDUALS, merge
from evictbench.cache.paged.head_budget import HeadBudgetCache
from evictbench.errors import UserError
from evictbench.generation.fidelity import Text, evaluate
from evictbench.generation.runner import ModelRunner
from evictbench.models.policy_weights import Weights
from evictbench.policies.indexmem_pp import IndexMem, Settings
from evictbench.policies.indexmem_pp.scorer import Scorer
from evictbench.policy import ModelShape
from evictbench.policy.budget import Budget
from twin.indexmem_pp import score_and_rate
from twin.indexmem_pp_run import Rules, Run, Told
from twin.tiny import random_tokens, tiny_model

WIDTH = 8


def random_tensors(hidden: int, layers: int, kv_heads: int, seed: int) -> dict[str, Tensor]:
    """Scores that spread over units and fall by as much within tens of positions."""
    generator = torch.Generator().manual_seed(seed)
    names = Scorer(hidden, WIDTH, kv_heads).state_dict()
    tensors = {name: torch.randn((layers, *tensor.shape), generator=generator) * 0.5 for name, tensor in names.items()}
    tensors["to_rate.weight"] *= 1000
    tensors["to_rate.bias"] = tensors["to_rate.bias"].abs() * 1000
    return tensors


def fitted(model: Any, seed: int = 0, **config: Any) -> tuple[IndexMem, dict[str, Tensor]]:
    shape = ModelShape.of(model.config)
    tensors = random_tensors(model.config.hidden_size, shape.layers, shape.kv_heads, seed)
    policy = IndexMem(Settings(**config))
    policy.use(Weights(tensors, {"settings": {"sinks": 2, "window": 4, "centroids": 2}}, "a test", "0"), shape)
    return policy, tensors


def twin_of(
    model: Any, tensors: dict[str, Tensor], rules: Rules, tokens: list[int], parts: list[tuple[int, int]]
) -> Told:
    by_layer = [{name: tensor[layer].double() for name, tensor in tensors.items()} for layer in range(2)]

    def scorer(layer: int, kv_head: int, position: int, received: Tensor) -> tuple[float, float]:
        return score_and_rate(by_layer[layer], received, position, kv_head)

    case = Case(rules, "llama", 0, 2, 2, len(tokens), 0, 1, "spread")
    twin = Run(model, scorer, rules, first_clusters(case), len(tokens))
    for begin, end in parts:
        twin.read(tokens[begin:end])
    return twin.told()


def in_parts(model: Any, cache: PagedCache, tokens: list[int], parts: list[tuple[int, int]]) -> Tensor:
    return torch.cat([forward(model, cache, tokens[begin:end]) for begin, end in parts])


def parts_of(length: int, context: int, chunk: int) -> list[tuple[int, int]]:
    """The context in chunks, then token by token."""
    chunks = [(begin, min(begin + chunk, context)) for begin in range(0, context, chunk)]
    return [*chunks, *((at, at + 1) for at in range(context, length))]


@pytest.mark.engine
@examples(12)
@given(
    length=st.integers(20, 60),
    context=st.integers(1, 50),
    chunk=st.integers(1, 40),
    budget=st.integers(9, 30),
    prefill=st.sampled_from(["native", "dense", "bounded"]),
    kind=st.sampled_from(["llama", "qwen3"]),
    seed=st.integers(0, 20),
)
def test_the_scorer_reads_what_attention_receives(
    length: int, context: int, chunk: int, budget: int, prefill: Any, kind: Any, seed: int
) -> None:
    model = tiny_model(kind)
    policy, tensors = fitted(model, seed)
    context = min(context, length)
    chunk = context if prefill == "native" else chunk
    tokens, parts = random_tokens(length, seed), parts_of(length, context, chunk)
    rules = Rules(context=context, budget=budget, sinks=2, window=4, centroids=2, prefill=prefill)
    twin = twin_of(model, tensors, rules, tokens, parts)
    assume(twin.closest > 1e-3)
    cache = new_cache(model, policy, budget, prefill=prefill, prompt_length=context)
    torch.testing.assert_close(in_parts(model, cache, tokens, parts), twin.logits, atol=1e-9, rtol=0)
    del cache
    assert not model.model.layers[0].self_attn._forward_pre_hooks


@pytest.mark.engine
@pytest.mark.parametrize("prefill", ["native", "bounded", "dense"])
def test_chunks_change_nothing(prefill: Any) -> None:
    model = tiny_model("qwen3")
    tokens = random_tokens(160, 2)
    policy, _ = fitted(model, 3, prompt="equal_share" if prefill == "native" else "divided")

    def read(chunk: int) -> tuple[Tensor, list[list[int]]]:
        cache = new_cache(model, policy, 32, prefill=prefill, prompt_length=130)
        logits = in_parts(model, cache, tokens, parts_of(160, 130, chunk))
        return logits, [kept(cache, layer, head) for layer in range(2) for head in range(2)]

    whole = read(130)
    for chunk in (1, 7, 64, 100):
        logits, held = read(chunk)
        assert held == whole[1]
        torch.testing.assert_close(logits, whole[0], atol=1e-9, rtol=0)


def test_a_divided_prompt_is_read_whole_whatever_the_chunk() -> None:
    model = tiny_model("qwen3")
    prompt = random_tokens(700, 2)
    policy, _ = fitted(model, 3)
    budget = Budget(tokens=32)
    found = [ModelRunner(model, policy, budget, chunk=chunk).prefill(prompt)[1] for chunk in (7, 512)]
    assert torch.equal(*found)
    assert [list(ModelRunner(model, policy, budget, chunk=7).chunks(20, at)) for at in (None, 12)] == [
        [(0, 20)],
        [(0, 12), (12, 20)],
    ]
    assert len(list(ModelRunner(model, policy, budget, prefill="dense", chunk=7).chunks(20, None))) == 3
    assert not torch.allclose(
        found[0], ModelRunner(model, fitted(model, 3, prompt="equal_share")[0], budget).prefill(prompt)[1]
    )


def test_a_divided_prompt_in_chunks_is_refused_before_anything_is_read() -> None:
    model = tiny_model("llama")
    policy, _ = fitted(model, 3)
    cache = new_cache(model, policy, 32, prompt_length=60)
    with pytest.raises(UserError, match=r"takes the prompt's 60 tokens in one forward pass, and not 40 of them\."):
        forward(model, cache, random_tokens(60, 1)[:40])
    assert cache.bytes_held == cache.nbytes() == 0
    # What fits the budget has nothing to divide.
    fits = new_cache(model, policy, 64, prompt_length=60)
    assert in_parts(model, fits, random_tokens(60, 1), [(0, 40), (40, 60)]).isfinite().all()


def test_a_question_in_one_chunk_or_token_by_token() -> None:
    model = tiny_model("llama")
    tokens = random_tokens(90, 4)
    policy, _ = fitted(model, 1)
    found = []
    for parts in ([(0, 50), (50, 70)], [(0, 50), (50, 51), (51, 62), (62, 70)], [(0, 50)]):
        cache = new_cache(model, policy, 20, prompt_length=50)
        after = parts[-1][1]
        found.append(in_parts(model, cache, tokens, [*parts, *((at, at + 1) for at in range(after, 90))]))
    torch.testing.assert_close(found[0], found[2], atol=1e-9, rtol=0)
    torch.testing.assert_close(found[1], found[2], atol=1e-9, rtol=0)


BUDGETS: list[int | str] = [14, 20, "50%"]


@pytest.mark.parametrize("budget", BUDGETS)
def test_rows_come_and_go(budget: int | str) -> None:
    model = tiny_model("llama")
    policy, _ = fitted(model, 2)
    texts = [random_tokens(n, n) for n in (100, 41, 73, 160, 25)]
    prompts = [40, 5, 60, 90, 20]

    check_rows_that_come_and_go(
        model,
        lambda length: new_cache(model, policy, budget, prompt_length=length),
        new_cache(model, policy, budget, rows=2),
        texts,
        prompts,
    )


@pytest.mark.parametrize("prefill", ["native", "bounded"])
@pytest.mark.parametrize("budget", [12, "50%"])
def test_left_padded_batches_in_generate(budget: int | str, prefill: Any) -> None:
    model: Any = tiny_model("llama")
    policy, _ = fitted(model, 5)
    prompts = [random_tokens(9, 1), random_tokens(31, 2), random_tokens(1, 3), random_tokens(12, 6)]

    def answers(some: list[list[int]]) -> list[list[int]]:
        return generate_padded(model, new_cache(model, policy, budget, prefill=prefill), some)

    assert answers(prompts) == [answers([prompt])[0] for prompt in prompts]


def test_rows_measure_as_the_twin_says() -> None:
    model = tiny_model("qwen3")
    policy, tensors = fitted(model, 4)
    made = []
    for key, (prompt, following) in enumerate([(40, 20), (50, 5), (60, 30), (30, 1)]):
        drawn = tuple(random_tokens(prompt + following, seed=key))
        made.append(Text(key, drawn[:prompt], drawn[prompt:]))
    measured = evaluate(model, policy, Budget(tokens=16), made, batch_size=2, chunk=17)
    for text, found in zip(made, measured, strict=True):
        tokens = [*text.prompt, *text.continuation]
        rules = Rules(context=len(text.prompt), budget=16, sinks=2, window=4, centroids=2)
        twin = twin_of(model, tensors, rules, tokens, parts_of(len(tokens), len(text.prompt), len(text.prompt)))
        logits = twin.logits.log_softmax(-1)
        nll = [-float(logits[at - 1, tokens[at]]) for at in range(len(text.prompt), len(tokens))]
        assert [one.nll for one in found.divergence] == pytest.approx(nll, abs=1e-4)
        seen = [
            [len(twin.seen[q][at]) + len(twin.counts[q][at]) for at in twin.seen[q]]
            for q in range(len(text.prompt), len(tokens) - 1)
        ]
        assert found.occupancy_max == max(map(max, seen), default=0)
        assert found.occupancy_mean == pytest.approx(sum(sum(s) / len(s) for s in seen) / len(seen) if seen else 0)
        assert found.occupancy_mean <= 16


def test_bounded_holds_the_budget_and_a_chunk() -> None:
    model = tiny_model("llama")
    policy, _ = fitted(model, 6, prompt="equal_share")
    for prefill in ("bounded", "native"):
        cache = new_cache(model, policy, 40, prefill=prefill, prompt_length=400)
        largest = 0
        for begin in range(0, 400, 50):
            forward(model, cache, random_tokens(400, 1)[begin : begin + 50])
            held = [layer.prompts[0].length for layer in cache.layers if layer.prompts]
            assert prefill == "native" or max(held, default=0) <= 40
            largest = max(largest, *held, 0)
        assert (largest >= 350) == (prefill == "native")
        assert cache.nbytes() == cache.bytes_held
        held_at_end = [len(kept(cache, layer, head)) for layer in range(2) for head in range(2)]
        assert sum(held_at_end) / 4 <= 40 - 1 - 2


@pytest.mark.engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_in_a_narrow_dtype_go_on_moving(dtype: torch.dtype) -> None:
    """Thousands of entries that drift join one mean. What queries read is their mean to the last digit of the cache's
    dtype, and what is held with its residual is the mean in float32."""
    model = deepcopy(tiny_model("llama")).to(dtype)
    policy, _ = fitted(model, centroids=1)
    cache = new_cache(model, policy, 16, prefill="dense", prompt_length=40)
    forward(model, cache, random_tokens(40, 1))
    forward(model, cache, random_tokens(1, 2))
    assert isinstance(cache, HeadBudgetCache)
    stack = cache.stack(layer.pool for layer in cache.layers if layer.pool is not None)
    stack.refresh()
    owners, evicted = cache.shape.kv_heads, stack.by_owner["newest"]
    fronts = stack.fronts[:, :owners, 0]
    held = {"keys": stack.keys, "values": stack.values}
    for name, buffers in held.items():
        stack.by_owner[RESIDUALS[name]].zero_()
        for pool, buffer in enumerate(buffers):
            buffer[fronts[pool]] = 0
    stack.by_owner["counts"].fill_(1)
    count, head_dim = 4000, stack.keys[0].shape[-1]
    noise = torch.randn((count, head_dim), generator=torch.Generator().manual_seed(0))
    entries = (torch.linspace(0, 1, count)[:, None] + 0.3 * noise).to(dtype)
    leave = torch.ones_like(evicted, dtype=torch.bool)
    for entry in entries:
        for keys, values, slots in zip(stack.keys, stack.values, evicted, strict=True):
            keys[slots], values[slots] = entry, 2 * entry
        merge(policy, stack, slice(0, owners), evicted, leave)
    mean = entries.double().sum(0) / (count + 1)
    assert (stack.by_owner["counts"] == count + 1).all()
    for name, wanted in (("keys", mean), ("values", 2 * mean)):
        for pool, buffer in enumerate(held[name]):
            read = buffer[fronts[pool]].double()
            residuals = stack.by_owner[RESIDUALS[name]][pool, :, 0]
            torch.testing.assert_close(read, wanted.expand_as(read), atol=0, rtol=torch.finfo(dtype).eps)
            torch.testing.assert_close(read + residuals, wanted.expand_as(read), atol=0, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residuals_of_means_are_counted_in_the_bytes(dtype: torch.dtype) -> None:
    """In float32 there is nothing; in a narrower dtype two numbers of four bytes for each element of a key."""
    model = deepcopy(tiny_model("llama")).to(dtype)
    policy, _ = fitted(model, centroids=3)
    cache = new_cache(model, policy, 24, prompt_length=60)
    forward(model, cache, random_tokens(60, 1))
    forward(model, cache, random_tokens(1, 2))
    assert cache.nbytes() == cache.bytes_held
    for layer in cache.layers:
        assert layer.pool is not None
        residuals = [tensor for name, tensor in layer.pool.owner_tensors.items() if name.startswith("residuals")]
        means, head_dim = cache.shape.kv_heads * 3, layer.pool.buffers["keys"].shape[-1]
        assert sum(tensor.nbytes for tensor in residuals) == (0 if dtype == torch.float32 else 8 * head_dim * means)
        without = [*layer.pool.buffers.values(), layer.pool.owner]
        without += [tensor for name, tensor in layer.pool._by_owner().items() if not name.startswith("residuals")]
        assert layer.nbytes() == sum(tensor.nbytes for tensor in (*without, *residuals))
