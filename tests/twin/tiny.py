"""Tiny random Llama and Qwen3 models that are float64 all the way through."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

Kind = Literal["llama", "qwen3"]

VOCAB = 97


class ExactRMSNorm(nn.Module):
    """RMSNorm in the input's own dtype: the one in transformers rounds to float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class ExactRotary(nn.Module):
    """Cosines and sines in float64: the ones in transformers are float32, off by 1e-7."""

    inv_freq: Tensor

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.config = rotary.config
        self.rope_type = rotary.rope_type
        self.attention_scaling: float = rotary.attention_scaling
        self.register_buffer("inv_freq", rotary.inv_freq.double(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[..., None].double() * self.inv_freq
        angles = torch.cat((freqs, freqs), dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def make_exact(model: PreTrainedModel) -> PreTrainedModel:
    """Turn a Llama or Qwen3 model to float64 and swap the modules in it that would round to float32."""
    model.double()
    child: Any
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("LlamaRMSNorm", "Qwen3RMSNorm"):
                setattr(parent, name, ExactRMSNorm(child.weight.detach().clone(), child.variance_epsilon))
    model.model.rotary_emb = ExactRotary(model.model.rotary_emb)
    return model


@cache
def tiny_model(
    kind: Kind = "llama",
    seed: int = 0,
    layers: int = 2,
    kv_heads: int = 2,
    groups: int = 2,
    head_dim: int = 16,
    tied: bool = False,
    flat: bool = False,
) -> PreTrainedModel:
    """A random causal LM in float64, the same object for the same arguments: leave its weights alone.

    Weights are scaled so that attention is far from uniform. `groups` query heads share each KV head. `flat`
    zeroes the queries, so that every query looks equally at all it sees: exact ties everywhere.
    """
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        raise ValueError(f"no tiny model of kind {kind!r}: llama or qwen3")
    model.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if weight.ndim == 1:
                weight.copy_(1 + 0.2 * noise)
            else:
                gain = 1.5 if ("q_proj" in name or "k_proj" in name) else 1.0
                weight.copy_(gain * noise / weight.shape[-1] ** 0.5)
            if flat and "q_proj" in name:
                weight.zero_()
    make_exact(model).requires_grad_(False)
    model.train(False)
    return model


def random_tokens(length: int, seed: int = 0) -> list[int]:
    """The same text for the same length and seed."""
    return random.Random(seed).choices(range(VOCAB), k=length)
