"""Which configs can be measured, and what the others are told. No weights, no network."""

from __future__ import annotations

from typing import Any

import pytest

from evictbench.errors import UserError
from evictbench.models import load

pytestmark = pytest.mark.engine

SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 97,
}
CYCLE = ["sliding_attention", "sliding_attention", "full_attention"]


def config_of(model_type: str, **settings: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**settings)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", SIZES),
        ("qwen3", SIZES | {"use_sliding_window": False, "sliding_window": 4096}),
        ("qwen3_moe", SIZES),
        ("qwen2", SIZES | {"use_sliding_window": False, "sliding_window": 131_072}),
        ("mistral", SIZES | {"sliding_window": None}),
        ("mixtral", SIZES | {"sliding_window": None}),
        ("phi3", SIZES | {"sliding_window": 262_144, "max_position_embeddings": 131_072, "pad_token_id": None}),
        ("gpt_neox", SIZES),
        ("gpt2", {"n_layer": 2}),
        ("gemma", SIZES),
        ("qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 4}),
        ("gemma3_text", SIZES | {"layer_types": CYCLE * 2, "sliding_window": 512}),
        ("gemma2", SIZES),
        ("olmo2", SIZES),
    ],
)
def test_plain_attention_passes(model_type, settings):
    load.check_supported(config_of(model_type, **settings))


@pytest.mark.parametrize(
    ("model_type", "settings", "sentence"),
    [
        (
            "mistral",
            SIZES | {"sliding_window": 4096, "max_position_embeddings": 32_768},
            "none of its layers attends to the whole text, so that there is nothing to evict",
        ),
        (
            "phi3",
            SIZES | {"sliding_window": 2047, "max_position_embeddings": 4096, "pad_token_id": None},
            "none of its layers attends to the whole text, so that there is nothing to evict",
        ),
        ("mamba", {}, "none of its layers attends to the whole text, so that there is nothing to evict"),
        ("deepseek_v32", {}, "have `indexed_attention` (layers 0-"),
        ("diffllama", SIZES, "differential attention"),
        ("bloom", {}, "does not go through transformers' attention interface"),
        ("t5", {}, "it is an encoder-decoder"),
        ("bert", {}, "it is an encoder"),
        ("vit", {}, "it is not a causal language model"),
    ],
)
def test_everything_else_is_refused_with_the_reason(model_type, settings, sentence):
    with pytest.raises(UserError) as refused:
        load.check_supported(config_of(model_type, **settings))
    assert sentence in str(refused.value)
    assert f"({model_type.removesuffix('_text')}" in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("rope", "window"),
    [
        (None, 32_768),
        ({"rope_type": "default", "rope_theta": 1e6}, 32_768),
        (
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768},
            131_072,
        ),
        ({"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}, 65_536),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            32_768,
        ),
    ],
)
def test_context_window_counts_rope_scaling(rope, window):
    config = config_of("llama", **SIZES, max_position_embeddings=32_768, rope_parameters=rope)
    assert load.context_window(config) == window


def test_unsupported_model_is_refused_before_its_weights_are_read(tmp_path):
    config_of("mistral", **SIZES, sliding_window=64).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="none of its layers attends to the whole text"):
        load.load_model(load.resolve(str(tmp_path)), "cpu")
