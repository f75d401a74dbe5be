"""Attention kernels that return their probabilities, for policies that read them.

They work in tiles: no tensor has the size of the prompt squared. Attention whose probabilities nobody reads uses
torch's own kernels instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evictbench.policy.tiles import TILE_ELEMENTS


def attend_and_observe(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scaling: float,
    *,
    sinks: tuple[int, Tensor] | None = None,
    causal_from: int | None = None,
    observe: bool = True,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention output, and how much each slot was attended to in total.

    query: `[rows, heads, queries, head_dim]`; keys, values: `[rows, kv_heads, slots, head_dim]`; bias: additive,
    `[rows or 1, kv_heads or 1, queries, slots]`, None for none but causality. sinks: (count, queries) where the first
    slots are seen by other queries. causal_from: every row's query i sees at most slots 0..causal_from + i; None:
    rows differ, and bias says. real: `[rows, queries]`, padding adds no mass.
    Returns the output like query, and the column sums of the softmax `[rows, kv_heads, group, slots]`, float32 or
    wider.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    query = (query * scaling).view(rows, kv_heads, group, queries, head_dim)
    output = torch.empty_like(query)
    mass = torch.zeros((rows, kv_heads, group, slots), dtype=wide, device=query.device) if observe else None
    sink_query = None if sinks is None else (sinks[1] * scaling).view_as(query)
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
        logits = logits.view(rows, kv_heads, group, stop - start, width)
        if bias is not None:
            logits += bias[:, :, None, start:stop, :width]
        else:
            assert causal_from is not None
            future = torch.ones(stop - start, width, dtype=torch.bool, device=query.device).triu(
                causal_from + start + 1
            )
            logits.masked_fill_(future, -torch.inf)
        probs = logits.softmax(-1, dtype=wide)
        if mass is not None:
            counted = probs if real is None else probs * real[:, None, None, start:stop, None]
            mass[..., :width] += counted.sum(-2)
        seen = probs.to(values.dtype).view(rows, kv_heads, size, width) @ values[:, :, :width]
        output[:, :, :, start:stop] = seen.view(rows, kv_heads, group, stop - start, head_dim)
    return output.view(rows, heads, queries, head_dim), mass


def attend_one(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention of one query a row, as decode needs at every step, and its probabilities.

    query `[rows, heads, 1, head_dim]`; returns the output like it, and `[rows, kv_heads, group, slots]`.
    """
    rows, heads, _, head_dim = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    part = query.reshape(rows * kv_heads, heads // kv_heads, head_dim)
    flat = keys.reshape(rows * kv_heads, slots, head_dim).transpose(1, 2)
    logits = torch.baddbmm(part.new_empty(()), part, flat, beta=0, alpha=scaling)
    if bias is not None:
        logits = (logits.view(rows, kv_heads, -1, slots) + bias).view(rows * kv_heads, -1, slots)
    probs = logits.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
    output = probs.to(values.dtype) @ values.reshape(rows * kv_heads, slots, head_dim)
    return output.view(rows, heads, 1, head_dim), probs.view(rows, kv_heads, -1, slots)


def probabilities(query: Tensor, keys: Tensor, bias: Tensor | None, scaling: float) -> Tensor:
    """The softmax rows of a few queries: `[rows, kv_heads, group, queries, slots]`, float32 or wider.

    Shapes as in `attend_and_observe`.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    part = (query * scaling).reshape(rows, kv_heads, -1, head_dim)
    logits = (part @ keys.transpose(-1, -2)).view(rows, kv_heads, heads // kv_heads, queries, slots)
    if bias is not None:
        logits = logits + bias[:, :, None]
    return logits.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
