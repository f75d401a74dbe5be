"""IndexMem++'s training gate: attention in which all that could be evicted shares a fixed mass.

In the softmax of query i every key j has a factor g. The protected ones (sinks, and the last `window` positions, i's
own included) have 1. The others, E_i, share `beta`: g = beta * softmax over E_i of gate_scale * what key j is worth to
query i (`scorer.effective`). Equal scores then weaken all of E_i alike, so that no choice of scores gives dense
attention back where E_i has more than beta members. Up to beta members g is 1: the gate would strengthen them.

Deviation from the authors' code (Chooovy/kvpress, indexmem/kernels): that last rule, which it does not have.
Nothing of shape [S, S] is kept: tiles of queries are attended one after the other, and the backward pass computes each
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
"""Logits of a tile, at most: on the CPU, where they should stay in its caches, and elsewhere."""


@dataclass(frozen=True)
class Gate:
    """sinks and window: what is protected. beta: the mass that the others share; None: the plain gate, for comparison,
    where every key, protected or not, has the factor exp(gate_scale * worth), and equal scores change nothing."""

    sinks: int
    window: int
    beta: float | None

    @property
    def first(self) -> int:
        """The first query that the gate changes anything for."""
        return 0 if self.beta is None else self.sinks + self.window + math.floor(self.beta)

    def competing(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys share the mass, `[queries, keys]` bool, from the positions of both."""
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

    score and rate: `[rows, kv_heads, S]`, of the keys; gate_scale: `[1]`. Gradients reach all six. Returns the output
    `[rows, heads, S, head_dim]` in the query's dtype, and, without a gradient, the share of attention that falls on
    keys which share the mass: a scalar, the mean over the queries that have such keys, not a number where none has.
    """
    return _Gated.apply(query, key, value, score, rate, gate_scale, gate, scaling)  # type: ignore[no-any-return,no-untyped-call]


@dataclass
class _Tile:
    """Some queries, and all keys up to the last of them. Heads of one group are rows of one matrix product."""

    start: int
    end: int
    gated: int  # how many of the queries have keys that share the mass
    queries: Tensor  # [rows, kv_heads, group * tile, head_dim], scaled
    competing: Tensor  # [tile, keys]
    distance: Tensor  # [tile, keys], in units of the rate
    worth: Tensor  # [rows, kv_heads, tile, keys]
    shares: Tensor  # the same shape: softmax over those that compete, 0 elsewhere
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
        taken, asked = torch.zeros((), dtype=dtype, device=query.device), 0
        with torch.autocast(query.device.type, enabled=False):
            for tile in _tiles(query, key, score, rate, gate_scale, gate, scaling):
                attended = tile.probs.flatten(2, 3) @ values[:, :, : tile.end]
                output[:, :, tile.start : tile.end] = _heads(attended, tile)
                if tile.gated:
                    taken += tile.probs.sum((0, 1, 2)).masked_fill_(~tile.competing, 0).sum()
                    asked += tile.gated * tile.probs[..., 0, 0].numel()
        ctx.save_for_backward(query, key, value, score, rate, gate_scale, output)
        ctx.gate, ctx.scaling = gate, scaling
        share = taken / asked if asked else torch.full_like(taken, torch.nan)
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
        # The slope of a logit is its probability times how much better its value is than the output.
        mean = (slope * output).sum(-1)
        with torch.autocast(query.device.type, enabled=False):
            for tile in _tiles(query, key, score, rate, gate_scale, ctx.gate, ctx.scaling):
                start, end = tile.start, tile.end
                asked = _grouped(slope[:, :, start:end], key.shape[1])
                logit_slope = (asked @ values[:, :, :end].mT).view_as(tile.probs)
                logit_slope.sub_(mean[:, :, start:end].unflatten(1, (key.shape[1], -1))[..., None]).mul_(tile.probs)
                value_slope[:, :, :end] += tile.probs.flatten(2, 3).mT @ asked
                flat = logit_slope.flatten(2, 3)
                key_slope[:, :, :end] += flat.mT @ tile.queries
                query_slope[:, :, start:end] = _heads(flat @ keys[:, :, :end], tile) * ctx.scaling
                if not tile.gated:
                    continue
                worth_slope = logit_slope.sum(2).masked_fill_(~tile.competing, 0)
                worth_slope -= tile.shares * worth_slope.sum(-1, keepdim=True)
                scale_slope += (worth_slope * tile.worth).sum()
                worth_slope *= gate_scale.to(dtype)
                score_slope[..., :end] += worth_slope.sum(-2)
                rate_slope[..., :end] += (worth_slope * tile.distance).sum(-2)
        found = query_slope, key_slope, value_slope, score_slope, rate_slope, scale_slope
        given = query, key, value, score, rate, gate_scale
        return *(part.to(like.dtype) for part, like in zip(found, given, strict=True)), None, None


def _tiles(
    query: Tensor, key: Tensor, score: Tensor, rate: Tensor, gate_scale: Tensor, gate: Gate, scaling: float
) -> Iterator[_Tile]:
    """All queries, some at a time, with their probabilities."""
    rows, heads, length, _ = query.shape
    kv_heads, dtype = key.shape[1], _wide(query.dtype)
    keys, score, rate = key.to(dtype), score.to(dtype), rate.to(dtype)
    positions = torch.arange(length, device=query.device)
    size = max(16, ELEMENTS[query.device.type != "cpu"] // (rows * heads * length))
    for start in range(0, length, size):
        end = min(start + size, length)
        asking, held = positions[start:end], positions[:end]
        competing = gate.competing(asking, held)
        distance = (asking[:, None] - held).to(dtype) / RATE_LENGTH
        queries = _grouped(query[:, :, start:end].to(dtype), kv_heads) * scaling
        logits = (queries @ keys[:, :, :end].mT).unflatten(2, (heads // kv_heads, -1))
        worth = shares = logits.new_zeros(())
        gated = max(0, end - max(start, gate.first))
        if gated:
            worth = score[:, :, None, :end] + rate[:, :, None, :end] * distance
            scaled = gate_scale.to(dtype) * worth
            if gate.beta is not None:
                shares, scaled = _of_mass(scaled, competing, gate.beta)
            logits += scaled.masked_fill_(~competing, 0)[:, :, None]
        # Of the keys, only those that are asking themselves can be later than a query.
        logits[..., start:].masked_fill_(held[start:] > asking[:, None], -torch.inf)
        yield _Tile(start, end, gated, queries, competing, distance, worth, shares, logits.softmax(-1))


def _of_mass(scaled: Tensor, competing: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Softmax over those that compete, 0 elsewhere; and the log of beta times it, where what others get is no matter.

    Where nothing competes the sum is left at 0, so that no infinity meets another.
    """
    alone = ~competing.any(-1, keepdim=True)
    total = scaled.masked_fill(~competing, -torch.inf).logsumexp(-1, keepdim=True).masked_fill_(alone, 0)
    log_shares = scaled - total
    return log_shares.exp().masked_fill_(~competing, 0), log_shares + math.log(beta)


def _grouped(tensor: Tensor, kv_heads: int) -> Tensor:
    """`[rows, heads, tile, head_dim]` to `[rows, kv_heads, group * tile, head_dim]`."""
    rows, heads, queries, head_dim = tensor.shape
    return tensor.reshape(rows, kv_heads, heads // kv_heads * queries, head_dim)


def _heads(grouped: Tensor, tile: _Tile) -> Tensor:
    """The way back."""
    rows, kv_heads, _, head_dim = grouped.shape
    return grouped.reshape(rows, kv_heads * tile.probs.shape[2], tile.end - tile.start, head_dim)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32
