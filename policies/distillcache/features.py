"""DistillCache's five features of an entry, computed from sums over layers and heads. No attention is stored.

The features, in the order of `recipe.NAMES` (`DistillCache` defines them). Tensors are float32, or
float64 where the model is. `heads` counts the query heads of all layers together, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

RECENT = 64
"""How many last queries an entry's entropy is computed from."""

ELEMENTS_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
"""The most probabilities that are held at a time, by kind of device."""


@dataclass(frozen=True)
class Totals:
    """Sums over the heads of some layers.

    mass, squares: `[rows, slots]`, the sums of each head's mean attention over the pass's queries, and of its square.
    attention: `[rows, slots, queries]`, the sum of the last queries' softmax rows. entropy: `[rows, queries]`, the sum
    of these rows' entropies in nats. norm: `[rows, new]`, the sum over KV heads of the lengths of the new values.
    """

    mass: Tensor
    squares: Tensor
    attention: Tensor
    entropy: Tensor
    norm: Tensor

    def plus(self, other: Totals) -> Totals:
        """The sums of both, on the device of this one. other: the totals of other layers."""
        device = self.mass.device
        return Totals(*(getattr(self, f.name) + getattr(other, f.name).to(device) for f in fields(self)))

    def to(self, device: torch.device) -> Totals:
        """The sums on a device."""
        return self if self.mass.device == device else Totals(*(getattr(self, f.name).to(device) for f in fields(self)))


def query_totals(probs: Tensor, values: Tensor) -> Totals:
    """The totals of one query in each row, as in decode. probs: `[rows, heads, slots]`, the softmax rows of any number
    of layers. values: `[rows, kv_heads, 1, head_dim]`, the new values of the same layers."""
    mass = probs.sum(1)
    return Totals(mass, probs.square().sum(1), mass[..., None], entropies(probs).sum(1)[:, None], lengths(values))


def chunk_totals(masses: Tensor, recent_probs: Callable[[int, int], Tensor], recent: int, values: Tensor) -> Totals:
    """The totals of one layer with several queries in each row, `recent` of which count for the entropy.

    masses: `[rows, heads, slots]`, each head's mean attention. recent_probs(n, before): softmax rows `[rows, kv_heads,
    group, n, slots]` of the n queries in front of the last `before`. values: `[rows, kv_heads, new, head_dim]`.
    """
    rows, heads, slots = masses.shape
    attention, entropy = masses.new_zeros(rows, slots, recent), masses.new_zeros(rows, recent)
    tile = max(1, ELEMENTS_AT_ONCE.get(masses.device.type, 2**22) // max(1, rows * heads * slots))
    for before in range(0, recent, tile):
        count = min(tile, recent - before)
        probs = recent_probs(count, before)
        columns = slice(recent - before - count, recent - before)
        attention[..., columns] = probs.sum((1, 2)).transpose(1, 2)
        entropy[:, columns] = entropies(probs).sum((1, 2))
    return Totals(masses.sum(1), masses.square().sum(1), attention, entropy, lengths(values))


def entropies(probs: Tensor) -> Tensor:
    """The entropy `[..]` of each softmax row `[.., slots]` over the keys that its query saw, in nats."""
    logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log_()
    return -logs.mul_(probs).sum(-1)


def lengths(values: Tensor) -> Tensor:
    """The lengths of values `[rows, kv_heads, new, head_dim]`, summed over KV heads, `[rows, new]`."""
    wide = torch.promote_types(values.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=wide)
    return norms.sum(1)


def variance(total: Tensor, squares: Tensor, heads: int) -> Tensor:
    """The population variance over heads. total, squares: the sums over heads of a number and of its square."""
    return (squares / heads - (total / heads).square()).clamp(min=0)


def weighted_entropy(attention: Tensor, entropy: Tensor) -> Tensor:
    """`Σ_q a_q(i) H_q / Σ_q a_q(i)`, `[rows, slots]`; 0 where no query attended to the entry. attention: `a`, `[rows,
    slots, queries]`. entropy: `H`, `[rows, queries]`."""
    sums = attention @ torch.stack((entropy, torch.ones_like(entropy)), dim=-1)
    weighted, total = sums.unbind(-1)
    return torch.where(total > 0, weighted / total, 0.0)


def relative_positions(positions: Tensor) -> Tensor:
    """The feature place, `[rows, slots]` float32: 0 for a row's first entry, 1 for its last, evenly between.

    positions: `[rows, slots]`, negative where a slot is empty.
    """
    empty = positions < 0
    order = positions.masked_fill(empty, torch.iinfo(positions.dtype).max).argsort(-1)
    index = torch.arange(positions.shape[1], dtype=torch.float32, device=positions.device).expand(order.shape)
    last = (positions.shape[1] - 1 - empty.sum(-1, keepdim=True)).clamp(min=1)
    return torch.empty_like(index).scatter_(-1, order, index) / last


def columns(query_positions: Tensor, recent: int) -> Tensor:
    """The columns of the last `recent` queries of a pass in the ring of `RECENT`, `[rows, recent]` int64.

    query_positions: `[rows, queries]`, -1 for padding, which comes before a row's tokens.
    """
    back = torch.arange(recent - 1, -1, -1, device=query_positions.device)
    return (query_positions.amax(-1, keepdim=True).long() - back) % RECENT
