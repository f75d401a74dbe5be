"""Tiny Llamas that any version of transformers builds alike: every weight follows from its name and a seed."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

LAYERS, HEADS, HEAD_DIM, VOCABULARY = 2, 4, 8, 64

SHOWN = 12
"""Of the vocabulary's logits the files hold the first so many."""

LONGEST = 256
"""The most positions that a tiny model knows."""


def settings(kv_heads: int) -> dict[str, Any]:
    """The arguments of its LlamaConfig."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": LONGEST,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }


def build(kv_heads: int, seed: int, attention: str = "eager") -> Any:
    """The LlamaForCausalLM of the installed transformers in float64, with the weights of a seed.

    attention: transformers' name of its attention function.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    chosen: dict[str, Any] = {"attn_implementation": attention}
    return with_weights(LlamaForCausalLM(LlamaConfig(**settings(kv_heads), **chosen)), seed)


def with_weights(model: Any, seed: int) -> Any:
    """A model in float64 whose weights are drawn anew, each from a stream of its own that its name and the seed begin.

    Queries and keys are scaled so that attention is far from uniform.
    """
    import torch

    model.double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            stream = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
            noise = torch.from_numpy(stream.standard_normal(tuple(weight.shape)))
            if weight.ndim == 1:
                weight.copy_(1 + 0.2 * noise)
            else:
                gain = 1.8 if "q_proj" in name or "k_proj" in name else 1.0
                weight.copy_(gain * noise / weight.shape[-1] ** 0.5)
    return model.requires_grad_(False).eval()


def text(length: int, seed: int) -> list[int]:
    """Random tokens, none of them twice, so that a token's values tell its position in the first layer too."""
    return [int(token) for token in np.random.RandomState(seed).permutation(VOCABULARY)[:length]]
