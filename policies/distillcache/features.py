"""What DistillCache knows of an entry: five numbers, made from sums over layers and heads. No attention is stored.

The numbers, in this order: alpha, norm, sigma, entropy, place (`DistillCache` says what each is). Tensors are float32,
or float64 where the model is. `heads` counts query heads of all layers together, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

NAMES = ("alpha", "norm", "sigma", "entropy", "place")

RECENT = 64
"""The last queries that an entry's entropy is made of."""

ELEMENTS_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
"""Probabilities that are looked at together."""


@dataclass(frozen=True)
class Totals:
    """Sums over heads, of some layers.

    mass, squares: `[rows, slots]`, of each head's mean attention over the pass's queries, and of its square.
    attention: `[rows, slots, queries]`, of the last queries' softmax rows; entropy: `[rows, queries]`, of these rows'
    entropies in nats. norm: `[rows, new]`, over KV heads, of the lengths of the new values.
    """

    mass: Tensor
    squares: Tensor
    attention: Tensor
    entropy: Tensor
    norm: Tensor

    def plus(self, other: Totals) -> Totals:
        """Those of both, on this one's device."""
        device = self.mass.device
        return Totals(*(getattr(self, f.name) + getattr(other, f.name).to(device) for f in fields(self)))

    def to(self, device: torch.device) -> Totals:
        """The same on a device."""
        return self if self.mass.device == device else Totals(*(getattr(self, f.name).to(device) for f in fields(self)))


def of_one_query(probs: Tensor, values: Tensor) -> Totals:
    """One query a row, as decode has it. probs: `[rows, heads, slots]`, the softmax rows of any number of layers;
    values: `[rows, kv_heads, 1, head_dim]` of as many."""
    mass = probs.sum(1)
    return Totals(mass, probs.square().sum(1), mass[..., None], entropies(probs).sum(1)[:, None], lengths(values))


def of_chunk(masses: Tensor, recent_probs: Callable[[int, int], Tensor], recent: int, values: Tensor) -> Totals:
    """One layer, several queries a row.

    masses: `[rows, heads, slots]`, the mean attention of each head; recent_probs(n, before): softmax rows `[rows,
    kv_heads, group, n, slots]` of the n queries in front of the last `before`; recent: how many are looked at.
    """
    rows, heads, slots = masses.shape
    attention, entropy = masses.new_zeros(rows, slots, recent), masses.new_zeros(rows, recent)
    tile = max(1, ELEMENTS_AT_ONCE.get(masses.device.type, 2**22) // max(1, rows * heads * slots))
    for before in range(0, recent, tile):
        count = min(tile, recent - before)
        probs = recent_probs(count, before)
        where = slice(recent - before - count, recent - before)
        attention[..., where] = probs.sum((1, 2)).transpose(1, 2)
        entropy[:, where] = entropies(probs).sum((1, 2))
    return Totals(masses.sum(1), masses.square().sum(1), attention, entropy, lengths(values))


def entropies(probs: Tensor) -> Tensor:
    """Of each softmax row, over the keys that its query saw: `[.., slots]` to `[..]`, in nats."""
    logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log_()
    return -logs.mul_(probs).sum(-1)


def lengths(values: Tensor) -> Tensor:
    """The lengths of value vectors, added over KV heads: `[rows, kv_heads, new, head_dim]` to `[rows, new]`."""
    wide = torch.promote_types(values.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=wide)
    return norms.sum(1)


def variance(total: Tensor, squares: Tensor, heads: int) -> Tensor:
    """Over heads, from the sums of a number and of its square."""
    return (squares / heads - (total / heads).square()).clamp(min=0)


def weighted_entropy(attention: Tensor, entropy: Tensor) -> Tensor:
    """`Σ_q a_q(i) H_q / Σ_q a_q(i)`: `[rows, slots, queries]` and `[rows, queries]` to `[rows, slots]`; 0 where none of
    the queries attended to the entry."""
    sums = attention @ torch.stack((entropy, torch.ones_like(entropy)), dim=-1)
    weighted, total = sums.unbind(-1)
    return torch.where(total > 0, weighted / total, 0.0)


def places(positions: Tensor) -> Tensor:
    """0 for a row's first entry, 1 for its last, evenly between: `[rows, slots]` float32.

    positions: `[rows, slots]`, negative where a slot is empty.
    """
    empty = positions < 0
    order = positions.masked_fill(empty, torch.iinfo(positions.dtype).max).argsort(-1)
    index = torch.arange(positions.shape[1], dtype=torch.float32, device=positions.device).expand(order.shape)
    last = (positions.shape[1] - 1 - empty.sum(-1, keepdim=True)).clamp(min=1)
    return torch.empty_like(index).scatter_(-1, order, index) / last


def columns(query_positions: Tensor, recent: int) -> Tensor:
    """Where the last `recent` of a pass's queries lie in the ring of `RECENT`: `[rows, recent]` int64, all different.

    query_positions: `[rows, queries]`, -1 for padding, which comes before a row's tokens.
    """
    back = torch.arange(recent - 1, -1, -1, device=query_positions.device)
    return (query_positions.amax(-1, keepdim=True).long() - back) % RECENT
