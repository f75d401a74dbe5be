"""A model that has had a cache of ours is as it was: its output equals sdpa's under any other cache, and under none."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    StaticCache,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from evictbench import EvictionCache
from evictbench.cache import attention
from evictbench.cache.probe import cache_argument
from evictbench.errors import UserError

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "attention_dropout": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "gemma3_text": WINDOWS}
"""One family without sliding windows, and one with them."""

TEXT = torch.randint(1, 97, (1, 20), generator=torch.Generator().manual_seed(0))
TWO = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(1))
CYCLE = torch.tensor([[1, 2, 3, 4] * 6])
LEFT, RIGHT = torch.ones(2, 20, dtype=torch.int64), torch.ones(2, 20, dtype=torch.int64)
LEFT[0, :7] = RIGHT[0, -7:] = 0
PACKED = torch.tensor([[*range(8), *range(12)]])
HOLE = torch.ones(20, 20, dtype=torch.bool).tril() & (torch.arange(20) != 3)
HOLE[3, 3] = True


def generate(model: Any, tokens: Tensor = TEXT, **options: Any) -> Tensor:
    """The tokens and the logits of all steps in one row; greedy unless it is said otherwise."""
    torch.manual_seed(0)
    if "cache" in options:
        options[cache_argument(model)] = options.pop("cache")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    output = model.generate(tokens, return_dict_in_generate=True, output_logits=True, **options)
    return torch.cat([output.sequences.flatten(), *(step.flatten() for step in output.logits)])


def logits(model: Any, tokens: Tensor = TEXT, **options: Any) -> Tensor:
    """The logits of one pass without gradients."""
    with torch.no_grad():
        found: Tensor = model(tokens, **options).logits
    return found


def train(model: Any, checkpoints: bool = False) -> Tensor:
    """The loss of a padded batch under dropout, and all gradients."""
    model.train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    torch.manual_seed(0)
    loss = model(TWO, attention_mask=LEFT, labels=TWO).loss
    loss.backward()
    return torch.cat([loss.detach()[None], *(weight.grad.flatten() for weight in model.parameters())])


def static(model: Any) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=64)


CASES: dict[str, Callable[[Any], Any]] = {
    "a new cache": generate,
    "no cache": lambda model: generate(model, use_cache=False),
    "dynamic": lambda model: generate(model, cache=DynamicCache()),
    "dynamic of the config": lambda model: generate(model, cache=DynamicCache(config=model.config)),
    "static": lambda model: generate(model, cache=static(model)),
    "static by name": lambda model: generate(model, cache_implementation="static"),
    "hybrid by name": lambda model: generate(model, cache_implementation="hybrid"),
    "left padding": lambda model: generate(model, TWO, attention_mask=LEFT),
    "left padding, no cache": lambda model: generate(model, TWO, attention_mask=LEFT, use_cache=False),
    "left padding, static": lambda model: generate(model, TWO, attention_mask=LEFT, cache=static(model)),
    "right padding": lambda model: logits(model, TWO, attention_mask=RIGHT),
    "beams": lambda model: generate(model, TWO, attention_mask=LEFT, num_beams=3),
    "sampling": lambda model: generate(model, do_sample=True, num_return_sequences=3),
    "prompt lookup": lambda model: generate(model, CYCLE, prompt_lookup_num_tokens=3),
    "assisted": lambda model: generate(model, CYCLE, assistant_model=model),
    "chunks": lambda model: generate(model, prefill_chunk_size=6),
    "chunks of a padded batch": lambda model: generate(model, TWO, attention_mask=LEFT, prefill_chunk_size=9),
    "embeddings": lambda model: generate(model, None, inputs_embeds=model.get_input_embeddings()(TEXT)),
    "a mask of four dimensions": lambda model: logits(model, attention_mask=HOLE[None, None]),
    "an additive mask": lambda model: logits(model, attention_mask=HOLE[None, None].float().log().clamp(min=-1e9)),
    "packed texts": lambda model: logits(model, position_ids=PACKED, use_cache=False),
    "both directions": lambda model: logits(both_directions(model), use_cache=False),
    "output_attentions": lambda model: model(TEXT, output_attentions=True).attentions,
    "training": train,
    "training with checkpoints": lambda model: train(model, checkpoints=True),
}


def both_directions(model: Any) -> Any:
    model.config.is_causal = False
    return model


@cache
def made(family: str) -> Any:
    config = CONFIG_MAPPING[family](**SIZES | FAMILIES[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def model_of(family: str = "llama") -> Any:
    """A random model of its own, as transformers makes it."""
    return copy.deepcopy(made(family))


def used(family: str) -> Any:
    """The same after a cache of ours has come and gone."""
    model = model_of(family)
    generate(model, cache=EvictionCache(model, "h2o", budget=8))
    gc.collect()
    assert model.config._attn_implementation == attention.NAME
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_the_output_is_that_of_sdpa(family: str, case: str) -> None:
    wanted, found = (CASES[case](model) for model in (model_of(family), used(family)))
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    else:
        assert found == wanted


def test_it_compiles_to_one_graph_as_sdpa_does() -> None:
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    module = made("llama").model.layers[0].self_attn
    whole = torch.compile(attention.attend, backend="eager", fullgraph=True)
    found, wanted = whole(module, query, key, key, None), ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, key, None)
    assert torch.equal(found[0], wanted[0])


def test_caches_of_several_kinds_take_turns() -> None:
    """Two of ours and one of transformers', each a step at a time, give what each gives alone."""
    model = model_of()
    kinds: list[Callable[[], Any]] = [
        lambda: EvictionCache(model, "h2o", budget=8),
        lambda: EvictionCache(model, "streaming_llm", budget=10),
        DynamicCache,
    ]
    steps = [TEXT[:, :14], *TEXT[:, 14:].split(1, dim=1)]

    def step(tokens: Tensor, cache: Any) -> Tensor:
        return logits(model, tokens, **{cache_argument(model): cache})

    alone = []
    for kind in kinds:
        own = kind()
        alone.append([step(tokens, own) for tokens in steps])
    caches = [kind() for kind in kinds]
    in_turns = [[step(tokens, cache) for cache in caches] for tokens in steps]
    for own_steps, turn in zip(alone, zip(*in_turns, strict=True), strict=True):
        for wanted, found in zip(own_steps, turn, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    model.set_attn_implementation("sdpa")
    plain = logits(model)
    torch.testing.assert_close(torch.cat(alone[2], 1), plain, rtol=1e-4, atol=1e-4)
    assert (torch.cat(alone[0], 1) - plain).abs().max() > 0.01, "nothing was evicted, so nothing was tested"


def test_sdpa_can_be_set_and_a_cache_made_again() -> None:
    model = used("llama")
    first = generate(model, cache=EvictionCache(model, "h2o", budget=8))
    model.set_attn_implementation("sdpa")
    assert torch.equal(generate(model), generate(model_of()))
    assert torch.equal(generate(model, cache=EvictionCache(model, "h2o", budget=8)), first)


def test_a_saved_model_does_not_name_our_attention(tmp_path: Path) -> None:
    model = used("llama")
    model.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.json"):
        assert attention.NAME not in file.read_text(), file.name
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(generate(loaded), generate(model))


def test_a_model_from_another_process_is_registered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickled model has our attention's name, and the process that loads it may not know it yet."""
    model = used("llama")
    wanted = generate(model, cache=EvictionCache(model, "h2o", budget=8))
    for known in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        names = {name: known[name] for name in known if name != attention.NAME}
        monkeypatch.setattr(type(known), "_global_mapping", names)
    assert attention.NAME not in AttentionInterface()
    assert attention.NAME not in AttentionMaskInterface()
    assert torch.equal(generate(model, cache=EvictionCache(model, "h2o", budget=8)), wanted)


def test_gradient_checkpointing_leaves_out_a_new_cache_of_ours() -> None:
    """transformers does so after the mask was made; the loss is that of no cache, and tokens already seen are not lost
    without a word."""
    model = model_of()
    wanted = train(model)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    torch.manual_seed(0)
    cache = EvictionCache(model, "h2o", budget=8)
    loss = model(TWO, attention_mask=LEFT, labels=TWO, use_cache=True, **{cache_argument(model): cache}).loss
    loss.backward()
    gradients = torch.cat([loss.detach()[None], *(weight.grad.flatten() for weight in model.parameters())])
    torch.testing.assert_close(gradients, wanted, rtol=0, atol=0)
    model.eval()  # a cache of ours drops out nothing
    logits(model, **{cache_argument(model): (cache := EvictionCache(model, "h2o", budget=8))})
    model.train()
    with pytest.raises(UserError, match="this one has seen tokens"):
        model(TEXT[:, :5], attention_mask=torch.ones(1, 25), **{cache_argument(model): cache})


@pytest.mark.parametrize(
    ("settings", "options", "sentence"),
    [
        ({}, {"attention_mask": HOLE[None, None]}, "not one of 4 dimensions"),
        ({"is_causal": False}, {}, "masks more than the future and padding"),
        (
            {"max_position_embeddings": 16, "sliding_window": 16},
            {},
            "attends with sliding_window=16",
        ),
        ({"max_position_embeddings": 20, "sliding_window": 20}, {}, None),
    ],
)
def test_masks_that_a_policy_cannot_keep_are_sentences(
    settings: dict[str, Any], options: dict[str, Any], sentence: str | None
) -> None:
    family = "mistral" if "sliding_window" in settings else "llama"
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | settings)).eval()
    cache = EvictionCache(model, "h2o", budget=20)
    if sentence is None:
        found = logits(model, **{cache_argument(model): cache}, **options)
        torch.testing.assert_close(found, logits(model, use_cache=False), rtol=1e-5, atol=1e-5)
        return
    with pytest.raises(UserError, match=sentence):
        logits(model, **{cache_argument(model): cache}, **options)
