"""The attention function under the model families that use it unpatched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

from evictbench.cache import attention
from evictbench.cache.new_cache import new_cache
from evictbench.cache.rope import fixed_frequencies_below
from evictbench.errors import UserError
from evictbench.models.supported import context_window
from evictbench.policies.full import Full
from evictbench.policies.h2o import H2O
from evictbench.policies.streaming_llm import StreamingLLM

pytestmark = pytest.mark.engine

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "llama3 rope": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "phi3": Phi3Config(**SIZES, sliding_window=None),
    "phi3 partial rotary": Phi3Config(
        **SIZES,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    ),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_budget_beyond_the_length_is_plain_generation(name: str) -> None:
    model = build(name)
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **settings)
    for policy, budget in ((Full(), None), (H2O(), 100), (StreamingLLM(), 100)):
        cache = new_cache(model, policy, budget, prompt_length=40)
        ours = model.generate(ids, past_key_values=cache, prefill_chunk_size=16, **settings)
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), atol=2e-4, rtol=0)
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("name", CONFIGS)
def test_shifted_sinks_are_rotated_as_the_model_rotates(name: str) -> None:
    """A chunk (queries turned back) and single steps (keys turned forward) must agree, for every rotary layout."""
    model = build(name)
    ids = torch.randint(1, 97, (1, 60), generator=torch.Generator().manual_seed(0))
    last = []
    with torch.no_grad():
        for chunk in (1, 60):
            cache = new_cache(model, StreamingLLM(), 16, prompt_length=60)
            for start in range(0, 60, chunk):
                logits = model(
                    input_ids=ids[:, start : start + chunk],
                    position_ids=torch.arange(start, start + chunk)[None],
                    past_key_values=cache,
                ).logits
            last.append(logits[0, -1])
    torch.testing.assert_close(last[0], last[1], atol=1e-4, rtol=0)


CHANGING: dict[str, Any] = {
    "dynamic": LlamaConfig(
        **SIZES | {"max_position_embeddings": 48},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    ),
    "longrope": Phi3Config(
        **SIZES,
        sliding_window=None,
        original_max_position_embeddings=48,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 48,
        },
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_text_that_changes_the_frequencies_is_refused(name: str) -> None:
    """Below that length they are fixed, and the cache is exact; `generate` does not go on without it above."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CHANGING[name]).eval()
    ids = torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 7}
    expected = model.generate(ids, **settings)
    assert fixed_frequencies_below(model.config) == 48
    assert context_window(model.config) == 47
    for chunk in (16, 64):
        for policy in (Full(), StreamingLLM()):
            cache = new_cache(model, policy, None if isinstance(policy, Full) else 100, prompt_length=40)
            ours = model.generate(ids, past_key_values=cache, prefill_chunk_size=chunk, **settings)
            assert ours.tolist() == expected.tolist()
    for length, new in ((40, 20), (60, 1)):
        cache = new_cache(model, Full(), None)
        with pytest.raises(UserError, match="from 48 tokens on"):
            model.generate(ids.repeat(1, 2)[:, :length], past_key_values=cache, **settings | {"max_new_tokens": new})


def test_without_a_cache_it_is_plain_attention() -> None:
    model = build("llama")
    ids = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        attention.use(model)
        ours = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(ours[0, 6:], expected[0, 6:], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[1], expected[1], atol=1e-5, rtol=0)
