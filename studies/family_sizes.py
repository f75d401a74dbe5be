"""How small a config of each model family is made to check it: sizes by name, and what single families need besides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evictbench.policy.layer_kinds import layer_kinds

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCABULARY = 64
LAYERS = 4
CONTEXT = 256
WINDOW = 16

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "n_embed", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"), CONTEXT),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention"), WINDOW),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 16),
    "mamba_d_ssm": 64,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rotary_dim": 4,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of a config by the name of the field, for every family that has such a field."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "bert-generation": {"is_decoder": True},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "dots1": {"n_shared_experts": 1},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "moshi": {"audio_vocab_size": VOCABULARY},
    "moss_transcribe_diarize": {
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
        }
    },
    "phi3": {"sliding_window": None},
    "phi4_multimodal": {
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 1,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    },
    "phimoe": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
}
"""What a family needs besides. Where a setting makes the difference between a family that is refused and one that is
accepted, the accepted one is built, and the document says so."""


def small_config(family: str, **settings: Any) -> PretrainedConfig:
    """A family's config in small. settings: further fields of its text part."""
    from transformers import CONFIG_MAPPING

    return _small(CONFIG_MAPPING[family], OVERRIDES.get(family, {}) | settings)


def _small(config_class: Any, more: dict[str, Any]) -> PretrainedConfig:
    """A config in small; with two layers of each kind that the default one has, where it says kinds."""
    small = _with_sizes(config_class, more)
    if "layer_types" in more or not getattr(small, "layer_types", None):
        return small
    try:
        names = list(dict.fromkeys(kind.name for kind in layer_kinds(config_class())))
    except Exception:  # a few families have no valid default
        return small
    if set(names) == {kind.name for kind in layer_kinds(small)}:
        return small
    types = (names * LAYERS)[: max(LAYERS, 2 * len(names))]
    try:
        return _with_sizes(config_class, more | {"layer_types": types, "num_hidden_layers": len(types)})
    except Exception:  # its kinds follow from other fields
        return small


def _with_sizes(config_class: Any, more: dict[str, Any]) -> PretrainedConfig:
    try:
        default = config_class()
    except Exception:  # a few families have no valid default
        default = config_class(**more)
    fields = default.to_dict()
    chosen: dict[str, Any] = {name: value for name, value in SIZES.items() if name in fields}
    if "qk_rope_head_dim" in chosen:  # latent attention: a key of each query head
        latent = {"head_dim": chosen["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
        chosen |= {name: value for name, value in latent.items() if name in fields}
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if name not in more and ("text" in name or "decoder" in name):
            own = getattr(default, name, None)
            text_class = type(own) if own is not None else part
            chosen[name] = _small(text_class, more).to_dict()
    small: PretrainedConfig = config_class(**chosen | {name: value for name, value in more.items() if name in fields})
    return small
