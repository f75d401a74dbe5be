"""Attention kernels that return their probabilities, for policies that read them.

They work in tiles: no tensor has the size of the prompt squared. Attention whose probabilities nobody reads uses
torch's own kernels instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evictbench.cache.softmax import Softmax
from evictbench.policy.tiles import TILE_ELEMENTS


def attend_and_observe(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    softmax: Softmax,
    *,
    sinks: tuple[int, Tensor] | None = None,
    causal_from: int | None = None,
    observe: bool = True,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention output, and how much each slot was attended to in total.

    query: `[rows, heads, queries, head_dim]`; keys, values: `[rows, kv_heads, slots, head_dim or value_dim]`; bias:
    additive, `[rows or 1, kv_heads or 1, queries, slots]`, None for none but causality. sinks: (count, queries) where
    the first slots are seen by other queries. causal_from: every row's query i sees at most slots 0..causal_from + i;
    None: rows differ, and bias says. real: `[rows, queries]`, padding adds no mass.
    Returns the output `[rows, heads, queries, value_dim]`, and the column sums of the softmax `[rows, kv_heads, group,
    slots]`, float32 or wider.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    value_dim = values.shape[3]
    query = (query * softmax.scaling).view(rows, kv_heads, group, queries, head_dim)
    output = query.new_empty((rows, kv_heads, group, queries, value_dim))
    mass = torch.zeros((rows, kv_heads, group, slots), dtype=wide, device=query.device) if observe else None
    sink_query = None if sinks is None else (sinks[1] * softmax.scaling).view_as(query)
    tile = max(1, TILE_ELEMENTS.get(query.device.type, 2**22) // max(1, rows * heads * slots))
    for start in range(0, queries, tile):
        stop = min(queries, start + tile)
        width = slots if causal_from is None else min(slots, causal_from + stop)
        size = group * (stop - start)
        part = query[:, :, :, start:stop].reshape(rows, kv_heads, size, head_dim)
        logits = part @ keys[:, :, :width].transpose(-1, -2)
        if sinks is not None and sink_query is not None:
            count = min(sinks[0], width)
            other = sink_query[:, :, :, start:stop].reshape(rows, kv_heads, size, head_dim)
            logits[..., :count] = other @ keys[:, :, :count].transpose(-1, -2)
        logits = softmax.capped(logits.view(rows, kv_heads, group, stop - start, width))
        if bias is not None:
            logits += bias[:, :, None, start:stop, :width]
        else:
            assert causal_from is not None
            future = torch.ones(stop - start, width, dtype=torch.bool, device=query.device).triu(
                causal_from + start + 1
            )
            logits.masked_fill_(future, -torch.inf)
        probs = softmax.probabilities(logits)
        if mass is not None:
            counted = probs if real is None else probs * real[:, None, None, start:stop, None]
            mass[..., :width] += counted.sum(-2)
        seen = probs.to(values.dtype).view(rows, kv_heads, size, width) @ values[:, :, :width]
        output[:, :, :, start:stop] = seen.view(rows, kv_heads, group, stop - start, value_dim)
    return output.view(rows, heads, queries, value_dim), mass


def attend_one(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Attention of one query a row, as decode needs at every step, and its probabilities.

    query `[rows, heads, 1, head_dim]`; returns the output `[rows, heads, 1, value_dim]`, and `[rows, kv_heads, group,
    slots]`.
    """
    rows, heads, _, head_dim = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    part = query.reshape(rows * kv_heads, heads // kv_heads, head_dim)
    flat = keys.reshape(rows * kv_heads, slots, head_dim).transpose(1, 2)
    logits = torch.baddbmm(part.new_empty(()), part, flat, beta=0, alpha=softmax.scaling)
    logits = softmax.capped(logits.view(rows, kv_heads, -1, slots))
    probs = softmax.probabilities(logits if bias is None else logits + bias)
    weights = probs.view(rows * kv_heads, -1, slots).to(values.dtype)
    output = weights @ values.reshape(rows * kv_heads, slots, values.shape[3])
    return output.view(rows, heads, 1, values.shape[3]), probs


def probabilities(query: Tensor, keys: Tensor, bias: Tensor | None, softmax: Softmax) -> Tensor:
    """The softmax rows of a few queries: `[rows, kv_heads, group, queries, slots]`, float32 or wider.

    Shapes as in `attend_and_observe`.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    part = (query * softmax.scaling).reshape(rows, kv_heads, -1, head_dim)
    logits = (part @ keys.transpose(-1, -2)).view(rows, kv_heads, heads // kv_heads, queries, slots)
    logits = softmax.capped(logits)
    return softmax.probabilities(logits if bias is None else logits + bias[:, :, None])
