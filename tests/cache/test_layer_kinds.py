"""Models whose layers differ: windows, chunks and states beside the layers that evict, capped logits, sinks, and latent
attention, against transformers' own cache and eager attention."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from evictbench import registry
from evictbench.cache.new_cache import new_cache
from evictbench.cache.probe import cache_argument, check_layers
from evictbench.models.supported import check_supported
from studies.family_sizes import small_config

WINDOW = 16
PROMPT = 36
STEPS = 6
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": ALTERNATING,
    "llama4_text": {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"] * 2},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {},
    "falcon_h1": {},
    "gpt_oss": ALTERNATING,
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 0.05},
    "mimo_v2_flash": {},
    "deepseek_v3": {},
}
"""A family of each kind of layer, and the fields of its small config: windows, blocks, linear attention, convolution,
state and attention in one layer, sinks, capped logits, values of another width, latent attention."""

TOLERANCE = 1e-5


@cache
def made(family: str) -> Any:
    """A random model in float32, with weights at which nothing is near zero."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(small_config(family, **FAMILIES[family]), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
    return model


def text(length: int, seed: int = 0) -> Tensor:
    """Random tokens `[1, length]`."""
    return torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(seed))


def read(model: Any, past: Any, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of a text that is given in parts of these sizes."""
    parts, start = [], 0
    for size in sizes:
        stop = start + size
        if mask is None:
            more, positions = {}, torch.arange(start, stop)[None].expand(ids.shape[0], -1)
        else:
            more = {"attention_mask": mask[:, :stop]}
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop]
        with torch.no_grad():
            output = model(
                input_ids=ids[:, start:stop],
                position_ids=positions,
                use_cache=True,
                **{cache_argument(model): past},
                **more,
            )
        parts.append(output.logits)
        start = stop
    return torch.cat(parts, 1)


def plain(model: Any, ids: Tensor, prompt: int) -> Tensor:
    """The same by transformers alone."""
    model.set_attn_implementation("eager")
    return read(model, DynamicCache(config=model.config), ids, [prompt] + [1] * (ids.shape[1] - prompt))


def ours(model: Any, budget: int | None, **settings: Any) -> Any:
    """A cache under H2O."""
    chosen = registry.parse_policy("h2o")
    return new_cache(model, chosen.policy(chosen.config), budget, **settings)


def near(one: Tensor, other: Tensor) -> None:
    """Logits are equal but for rounding."""
    torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_of_the_whole_text_is_transformers_cache(family: str) -> None:
    """In one pass and in chunks, alone and beside a row with padding; bytes are counted as they are found."""
    model = made(family)
    check_supported(model.config)
    check_layers(model)
    ids, short = text(PROMPT + STEPS), text(PROMPT + STEPS - 7, seed=1)
    expected = plain(model, ids, PROMPT), plain(model, short, PROMPT - 7)
    for sizes in ([PROMPT], [5, 31]):
        past = ours(model, 100, prompt_length=PROMPT)
        near(read(model, past, ids, sizes + [1] * STEPS), expected[0])
        assert past.bytes_held == past.nbytes()
    both = torch.cat([ids, torch.cat([torch.zeros(1, 7, dtype=torch.long), short], 1)])
    mask = torch.ones_like(both)
    mask[1, :7] = 0
    found = read(model, ours(model, 100, prompt_length=PROMPT), both, [16, PROMPT - 16] + [1] * STEPS, mask)
    near(found[:1], expected[0])
    near(found[1:, 7:], expected[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_come_and_go(family: str) -> None:
    """Rows of different lengths are admitted and released, and the cache is copied in between."""
    model = made(family)
    texts = [text(length, seed) for seed, length in enumerate((50, 23, 37))]
    expected = [plain(model, ids, ids.shape[1] - 12) for ids in texts]
    pool = ours(model, 100, rows=3)
    inside: list[tuple[int, int]] = []

    def admit(number: int) -> None:
        prompt = texts[number].shape[1] - 12
        past = ours(model, 100, prompt_length=prompt)
        read(model, past, texts[number][:, :prompt], [prompt])
        pool.admit(past)
        inside.append((number, prompt))

    def step() -> None:
        tokens = torch.tensor([[int(texts[number][0, at])] for number, at in inside])
        positions = torch.tensor([[at] for _, at in inside])
        with torch.no_grad():
            output = model(input_ids=tokens, position_ids=positions, use_cache=True, **{cache_argument(model): pool})
        for row, (number, at) in enumerate(inside):
            near(output.logits[row, 0], expected[number][0, at])
            inside[row] = number, at + 1

    for number in (0, 1, 2):
        admit(number)
        step()
        step()
    pool = copy.deepcopy(pool)
    step()
    pool.release(0)
    inside[0] = inside[-1]
    inside.pop()
    step()
    admit(0)
    step()
    assert pool.bytes_held == pool.nbytes()


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_only_layers_that_attend_to_the_whole_text_evict(family: str) -> None:
    model = made(family)
    past = ours(model, 20, prompt_length=PROMPT)
    read(model, past, text(PROMPT + STEPS), [PROMPT] + [1] * STEPS)
    assert past.shape.layers == 2
    assert past.shape.numbers == (1, 3)
    assert [past.kept(layer).shape[1] for layer in range(2)] == [19, 19]
    entry = 2 * 8 * 4
    assert past.nbytes() == past.evictable_bytes() + past.fixed_bytes()
    if family == "gemma3_text":  # two layers of 16 tokens in 2 KV heads
        assert past.fixed_bytes() == 2 * WINDOW * 2 * entry
