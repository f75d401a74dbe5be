"""IndexMem++'s training gate: attention in which the keys that could be evicted share a fixed mass.

In the softmax of query i every key j has a factor g. Protected keys (sinks, and the last `window` positions, i's own
included) have g = 1. The others, E_i, share `beta`: g = beta * softmax over E_i of gate_scale * the score of key j for
query i (`scorer.effective`). Equal scores then weaken all of E_i equally, so that no scores can restore dense attention
where E_i has more than beta members. Up to beta members g is 1, because the gate would strengthen them.

Deviation from the authors' code (Chooovy/kvpress, indexmem/kernels): that last rule, which it does not have.
No tensor of shape [S, S] is kept: queries are attended tile by tile, and the backward pass computes each tile
again. Plain torch on every device, so that the same batch gives the same gradients; float32 inside, or float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .scorer import RATE_LENGTH

ELEMENTS = 2**19, 2**27
"""The most logits of a tile: on the CPU, where they should fit its caches, and on other devices."""


@dataclass(frozen=True)
class Gate:
    """sinks, window: protected first and last positions. beta: the mass that the other keys share; None: the plain
    gate, for comparison, in which each key, protected or not, has the factor exp(gate_scale * score)."""

    sinks: int
    window: int
    beta: float | None

    @property
    def first(self) -> int:
        """The first query whose attention the gate changes."""
        return 0 if self.beta is None else self.sinks + self.window + math.floor(self.beta)

    def competing(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether each key shares the mass, `[queries, keys]` bool. queries `[queries]`, keys `[keys]`: positions."""
        queries, keys = queries[:, None], keys[None]
        if self.beta is None:
            return keys <= queries
        return (keys >= self.sinks) & (keys <= queries - self.window) & (queries >= self.first)


def attend_gated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Tensor,
    rate: Tensor,
    gate_scale: Tensor,
    gate: Gate,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention of query `[rows, heads, S, head_dim]` over key and value `[rows, kv_heads, S, head_dim]`.

    score, rate: `[rows, kv_heads, S]`, of the keys. gate_scale: `[1]`. scaling: of the logits. Gradients reach all six
    tensors. Returns the output `[rows, heads, S, head_dim]` in the query's dtype, and, without a gradient, the share of
    attention on keys that share the mass: a scalar, the mean over queries that have such keys; NaN where none has.
    """
    return _Gated.apply(query, key, value, score, rate, gate_scale, gate, scaling)  # type: ignore[no-any-return,no-untyped-call]


@dataclass
class _Tile:
    """Some queries, and all keys up to the last query. Heads of one group are rows of one matrix product."""

    start: int
    end: int
    gated: int  # the number of queries with keys that share the mass
    queries: Tensor  # [rows, kv_heads, group * tile, head_dim], scaled
    competing: Tensor  # [tile, keys]
    distance: Tensor  # [tile, keys], in units of the rate
    effective: Tensor  # [rows, kv_heads, tile, keys], the score of each key for each query
    shares: Tensor  # [rows, kv_heads, tile, keys], softmax over the keys that compete, 0 elsewhere
    probs: Tensor  # [rows, kv_heads, group, tile, keys]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score: Tensor,
        rate: Tensor,
        gate_scale: Tensor,
        gate: Gate,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        dtype = _wide(query.dtype)
        output = torch.empty_like(query, dtype=dtype)
        values = value.to(dtype)
        mass, count = torch.zeros((), dtype=dtype, device=query.device), 0
        with torch.autocast(query.device.type, enabled=False):
            for tile in _tiles(query, key, score, rate, gate_scale, gate, scaling):
                attended = tile.probs.flatten(2, 3) @ values[:, :, : tile.end]
                output[:, :, tile.start : tile.end] = _heads(attended, tile)
                if tile.gated:
                    mass += tile.probs.sum((0, 1, 2)).masked_fill_(~tile.competing, 0).sum()
                    count += tile.gated * tile.probs[..., 0, 0].numel()
        ctx.save_for_backward(query, key, value, score, rate, gate_scale, output)
        ctx.gate, ctx.scaling = gate, scaling
        share = mass / count if count else torch.full_like(mass, torch.nan)
        ctx.mark_non_differentiable(share)
        return output.to(query.dtype), share

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, score, rate, gate_scale, output = ctx.saved_tensors
        dtype = output.dtype
        slope, keys, values = slope.to(dtype), key.to(dtype), value.to(dtype)
        query_slope = torch.empty_like(query, dtype=dtype)
        key_slope, value_slope = torch.zeros_like(keys), torch.zeros_like(values)
        score_slope, rate_slope = torch.zeros_like(score, dtype=dtype), torch.zeros_like(rate, dtype=dtype)
        scale_slope = torch.zeros_like(gate_scale, dtype=dtype)
        # The gradient of a logit is its probability times (slope · value - slope · output).
        mean = (slope * output).sum(-1)
        with torch.autocast(query.device.type, enabled=False):
            for tile in _tiles(query, key, score, rate, gate_scale, ctx.gate, ctx.scaling):
                start, end = tile.start, tile.end
                output_slope = _grouped(slope[:, :, start:end], key.shape[1])
                logit_slope = (output_slope @ values[:, :, :end].mT).view_as(tile.probs)
                logit_slope.sub_(mean[:, :, start:end].unflatten(1, (key.shape[1], -1))[..., None]).mul_(tile.probs)
                value_slope[:, :, :end] += tile.probs.flatten(2, 3).mT @ output_slope
                flat = logit_slope.flatten(2, 3)
                key_slope[:, :, :end] += flat.mT @ tile.queries
                query_slope[:, :, start:end] = _heads(flat @ keys[:, :, :end], tile) * ctx.scaling
                if not tile.gated:
                    continue
                effective_slope = logit_slope.sum(2).masked_fill_(~tile.competing, 0)
                effective_slope -= tile.shares * effective_slope.sum(-1, keepdim=True)
                scale_slope += (effective_slope * tile.effective).sum()
                effective_slope *= gate_scale.to(dtype)
                score_slope[..., :end] += effective_slope.sum(-2)
                rate_slope[..., :end] += (effective_slope * tile.distance).sum(-2)
        slopes = query_slope, key_slope, value_slope, score_slope, rate_slope, scale_slope
        inputs = query, key, value, score, rate, gate_scale
        return *(part.to(like.dtype) for part, like in zip(slopes, inputs, strict=True)), None, None


def _tiles(
    query: Tensor, key: Tensor, score: Tensor, rate: Tensor, gate_scale: Tensor, gate: Gate, scaling: float
) -> Iterator[_Tile]:
    """The tiles of all queries, with their probabilities."""
    rows, heads, length, _ = query.shape
    kv_heads, dtype = key.shape[1], _wide(query.dtype)
    keys, score, rate = key.to(dtype), score.to(dtype), rate.to(dtype)
    positions = torch.arange(length, device=query.device)
    size = max(16, ELEMENTS[query.device.type != "cpu"] // (rows * heads * length))
    for start in range(0, length, size):
        end = min(start + size, length)
        query_positions, key_positions = positions[start:end], positions[:end]
        competing = gate.competing(query_positions, key_positions)
        distance = (query_positions[:, None] - key_positions).to(dtype) / RATE_LENGTH
        queries = _grouped(query[:, :, start:end].to(dtype), kv_heads) * scaling
        logits = (queries @ keys[:, :, :end].mT).unflatten(2, (heads // kv_heads, -1))
        effective = shares = logits.new_zeros(())
        gated = max(0, end - max(start, gate.first))
        if gated:
            effective = score[:, :, None, :end] + rate[:, :, None, :end] * distance
            scaled = gate_scale.to(dtype) * effective
            if gate.beta is not None:
                shares, scaled = _shares_of_mass(scaled, competing, gate.beta)
            logits += scaled.masked_fill_(~competing, 0)[:, :, None]
        # Only the keys of the tile's own positions can be later than a query.
        logits[..., start:].masked_fill_(key_positions[start:] > query_positions[:, None], -torch.inf)
        yield _Tile(start, end, gated, queries, competing, distance, effective, shares, logits.softmax(-1))


def _shares_of_mass(scaled: Tensor, competing: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The softmax over the keys that compete, 0 elsewhere, and the log of beta times it, arbitrary elsewhere.

    Where no key competes the sum stays 0, so that no difference of infinities arises.
    """
    alone = ~competing.any(-1, keepdim=True)
    total = scaled.masked_fill(~competing, -torch.inf).logsumexp(-1, keepdim=True).masked_fill_(alone, 0)
    log_shares = scaled - total
    return log_shares.exp().masked_fill_(~competing, 0), log_shares + math.log(beta)


def _grouped(tensor: Tensor, kv_heads: int) -> Tensor:
    """A tensor `[rows, heads, tile, head_dim]` as `[rows, kv_heads, group * tile, head_dim]`."""
    rows, heads, queries, head_dim = tensor.shape
    return tensor.reshape(rows, kv_heads, heads // kv_heads * queries, head_dim)


def _heads(grouped: Tensor, tile: _Tile) -> Tensor:
    """A tensor `[rows, kv_heads, group * tile, head_dim]` as `[rows, heads, tile, head_dim]`."""
    rows, kv_heads, _, head_dim = grouped.shape
    return grouped.reshape(rows, kv_heads * tile.probs.shape[2], tile.end - tile.start, head_dim)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32
