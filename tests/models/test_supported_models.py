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
            "of its 6 layers 6 have sliding-window attention of 4096 tokens (layers 0-5)",
        ),
        (
            "phi3",
            SIZES | {"sliding_window": 2047, "max_position_embeddings": 4096, "pad_token_id": None},
            "6 have sliding-window attention of 2047 tokens",
        ),
        (
            "qwen2",
            SIZES | {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 4},
            "of its 6 layers 2 have sliding-window attention of 1024 tokens (layers 4-5)",
        ),
        (
            "gemma3_text",
            SIZES | {"layer_types": CYCLE * 2, "sliding_window": 512},
            "of its 6 layers 4 have sliding-window attention of 512 tokens (layers 0-1, 3-4)",
        ),
        ("gemma3", {}, "sliding-window attention"),
        ("gemma2", SIZES, "3 have sliding-window attention of 4096 tokens (layers 0, 2, 4)"),
        ("gpt_oss", SIZES, "3 have sliding-window attention of 128 tokens (layers 0, 2, 4)"),
        ("qwen3_next", {}, "36 have linear attention (layers 0-2, 4-6, 8-10"),
        ("llama4_text", {}, "36 have chunked attention"),
        ("jamba", {}, "28 have linear attention"),
        ("mamba", {}, "32 have linear attention"),
        ("falcon_h1", {}, "have `hybrid`"),
        ("deepseek_v3", {}, "multi-head latent attention"),
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
    config_of("gemma2", **SIZES).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="sliding-window attention"):
        load.load_model(load.resolve(str(tmp_path)), "cpu")
