"""A dense, readable float64 forward of a Llama or Qwen3 model with explicit visibility."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass
class Forward:
    """What one dense forward computed, per layer, in float64.

    queries, keys: [tokens, heads or kv_heads, head_dim], after RoPE at the true positions; values as keys.
    probs: [heads, tokens, tokens], row = query, zero where the query did not look. logits: [tokens, vocab].
    """

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    probs: list[Tensor]
    logits: Tensor


class DenseModel:
    """The pieces of a decoder layer around attention, taken from a transformers model's own weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        if any(p.dtype != torch.float64 for p in model.parameters()):
            model = copy.deepcopy(model).double()
        config = model.config
        self.model = model
        self.layers = len(model.model.layers)
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.group = self.heads // self.kv_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, hidden]."""
        hidden: Tensor = self.model.model.embed_tokens(torch.tensor(tokens))
        return hidden

    def project(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (before RoPE) and values: [tokens, heads or kv_heads, head_dim]."""
        block = self.model.model.layers[layer]
        attention = block.self_attn
        normed = block.input_layernorm(hidden)
        queries = attention.q_proj(normed).view(-1, self.heads, self.head_dim)
        keys = attention.k_proj(normed).view(-1, self.kv_heads, self.head_dim)
        values = attention.v_proj(normed).view(-1, self.kv_heads, self.head_dim)
        if hasattr(attention, "q_norm"):
            queries = attention.q_norm(queries)
            keys = attention.k_norm(keys)
        return queries, keys, values

    def rotate(self, vectors: Tensor, positions: Sequence[int]) -> Tensor:
        """RoPE: turn vectors [n, heads, head_dim] to n positions."""
        cos, sin = self.model.model.rotary_emb(vectors, torch.tensor([list(positions)]))
        half = self.head_dim // 2
        cos, sin = cos[0, :, None, :half], sin[0, :, None, :half]
        first, second = vectors[..., :half], vectors[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def softmax(self, layer: int, query: Tensor, keys: Tensor) -> Tensor:
        """Probabilities [n] of one query [head_dim] over n keys [n, head_dim]."""
        logits = keys @ query * self.model.model.layers[layer].self_attn.scaling
        weights = torch.exp(logits - logits.max())
        return weights / weights.sum()

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, from attention's output [tokens, heads, head_dim]."""
        block = self.model.model.layers[layer]
        hidden = hidden + block.self_attn.o_proj(attended.reshape(len(hidden), -1))
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, vocab]."""
        logits: Tensor = self.model.lm_head(self.model.model.norm(hidden))
        return logits


def dense_forward(
    model: PreTrainedModel,
    tokens: Sequence[int],
    visible: Callable[[int, int, int], Sequence[int]] = lambda layer, kv_head, query: range(query + 1),
) -> Forward:
    """All tokens at once; query q of a layer's KV head sees exactly `visible(layer, kv_head, q)`."""
    dense = DenseModel(model)
    out = Forward([], [], [], [], torch.empty(0))
    with torch.no_grad():
        hidden = dense.embed(tokens)
        everyone = range(len(tokens))
        for layer in range(dense.layers):
            queries, keys, values = dense.project(layer, hidden)
            queries, keys = dense.rotate(queries, everyone), dense.rotate(keys, everyone)
            probs = torch.zeros(dense.heads, len(tokens), len(tokens), dtype=torch.float64)
            attended = torch.zeros_like(queries)
            for query in everyone:
                for head in range(dense.heads):
                    kv_head = head // dense.group
                    seen = list(visible(layer, kv_head, query))
                    p = dense.softmax(layer, queries[query, head], keys[seen, kv_head])
                    probs[head, query, seen] = p
                    attended[query, head] = p @ values[seen, kv_head]
            hidden = dense.finish(layer, hidden, attended)
            out.queries.append(queries)
            out.keys.append(keys)
            out.values.append(values)
            out.probs.append(probs)
        out.logits = dense.logits(hidden)
    return out
