"""KVpop's ranking: scores that fall with age, and the pool of entries that it keeps at every query.

Positions count from 0. At query q the sinks are 0 .. sinks - 1, the window is (q - window, q], q itself included, and
`E(q) = {t : sinks <= t <= q - window}` competes for the pool; `t_new = q - window` joins it. Age enters as
`(q - t) · log gamma`, so that the order at every q is that of the static priority `r_t - t · log gamma`. The arguments
sinks, window and pool are numbers of entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from evictbench.policy import NEVER

GAMMA = (0.999, 0.999999)
"""The bounds of a KV head's decay (arXiv 2607.05061 v2)."""


def bounded_log_gamma(raw: Tensor) -> Tensor:
    """`log gamma`, float32, within the logarithms of `GAMMA`. raw: an unbounded parameter of any shape."""
    low, high = math.log(GAMMA[0]), math.log(GAMMA[1])
    return (low + (high - low) * raw.float().sigmoid()).clamp(low, high)


def priority(score: Tensor, log_gamma: Tensor, positions: Tensor | None = None) -> Tensor:
    """The static priority of each token, `[.., S]` float32.

    score: `[.., S]`. log_gamma: broadcastable to `[..]`. positions: broadcastable to `[.., S]`; None: 0 .. S - 1.
    """
    if positions is None:
        positions = torch.arange(score.shape[-1], device=score.device)
    return score.float() - positions.float() * log_gamma.float()[..., None]


@dataclass(frozen=True)
class Boundaries:
    """The result of the competition for the pool at every query.

    boundary: `[.., S]` int64, the position of the worst entry of E(q) that the pool keeps; -1 where E(q) fits.
    keeps_new: `[.., S]` bool, whether t_new is kept; False where nothing joins.
    """

    boundary: Tensor
    keeps_new: Tensor


def boundaries(priority: Tensor, *, sinks: int, window: int, pool: int) -> Boundaries:
    """The boundaries at every query, by priorities `[.., S]`; of equal ones the earlier is kept. O(S log S)."""
    length = priority.shape[-1]
    by_rank, ranks = _ranked(priority.detach())
    boundary = torch.full(priority.shape, -1, dtype=torch.int64, device=priority.device)
    keeps_new = torch.zeros(priority.shape, dtype=torch.bool, device=priority.device)
    full = first_full(length, sinks, window, pool)
    keeps_new[..., sinks + window : full] = True
    if length > full and pool > 0:
        worst = worst_kept(ranks, length, sinks=sinks, window=window, pool=pool)
        boundary[..., full:] = by_rank.gather(-1, worst)
        keeps_new[..., full:] = ranks[..., full - window : length - window] <= worst
    return Boundaries(boundary, keeps_new)


def sequence_expiry(priority: Tensor, *, sinks: int, window: int, pool: int) -> Tensor:
    """The first query that no longer sees each token of a whole sequence, `[.., S]` int64; NEVER where all see it.

    priority: `[.., S]`. The query after the last token counts too. The worst kept rank only
    improves, so that one search per token finds the query at which it has passed the token's rank. O(S log S).
    """
    length = priority.shape[-1]
    _, ranks = _ranked(priority.detach())
    positions = torch.arange(length, device=priority.device)
    full = first_full(length + 1, sinks, window, pool)
    if length < full:
        return torch.full(priority.shape, NEVER, device=priority.device)
    worst = worst_kept(ranks, length + 1, sinks=sinks, window=window, pool=pool)
    passed = torch.searchsorted((-worst).contiguous(), (-ranks).contiguous(), right=True)
    expiry = torch.maximum(full + passed, positions + window)
    return expiry.masked_fill((positions < sinks) | (expiry > length), NEVER)


def first_full(queries: int, sinks: int, window: int, pool: int) -> int:
    """The first of so many queries at which E(q) does not fit the pool; `queries` where it always does."""
    return min(queries, sinks + window + pool)


def worst_kept(ranks: Tensor, queries: int, *, sinks: int, window: int, pool: int) -> Tensor:
    """The rank of the worst entry of E(q) that the pool keeps, at each query from `first_full` to `queries - 1`.

    ranks: `[.., S]`, distinct, 0 the best. It is the pool-th smallest rank of each prefix, and -1 for an empty pool.
    """
    full = first_full(queries, sinks, window, pool)
    ends = torch.arange(full, queries, device=ranks.device) - window - sinks + 1
    ends = ends.expand(*ranks.shape[:-1], -1)
    if pool < 1:
        return torch.full_like(ends, -1)
    return kth_of_prefixes(ranks[..., sinks : queries - window], ends, pool - 1, ranks.shape[-1])


def kth_of_prefixes(values: Tensor, ends: Tensor, k: int, above: int) -> Tensor:
    """The k-th smallest value of each prefix, `[.., queries]`; k counts from 0.

    values: `[.., n]`, whole numbers in [0, above). ends: `[.., queries]`, the lengths of the prefixes. The values
    are split by their bits (a wavelet matrix), the highest first, each time in their order, and every prefix is
    followed into the half that holds its k-th smallest. O((n + queries) log above), without a loop over either.
    """
    begin, end = torch.zeros_like(ends), ends
    rank = torch.full_like(ends, k)
    result = torch.zeros_like(ends)
    for bit in range(max(1, (above - 1).bit_length()) - 1, -1, -1):
        ones = (values >> bit) & 1
        zeros_before = torch.nn.functional.pad((1 - ones).cumsum(-1), (1, 0))
        zeros = zeros_before[..., -1:]
        low, high = zeros_before.gather(-1, begin), zeros_before.gather(-1, end)
        upper = rank >= high - low
        begin = torch.where(upper, zeros + begin - low, low)
        end = torch.where(upper, zeros + end - high, high)
        rank = torch.where(upper, rank - (high - low), rank)
        result = result + (upper.long() << bit)
        destination = torch.where(ones.bool(), zeros + ones.cumsum(-1) - 1, zeros_before[..., :-1])
        values = torch.empty_like(values).scatter_(-1, destination, values)
    return result


def _ranked(priority: Tensor) -> tuple[Tensor, Tensor]:
    """The position of each rank, and the rank of each position, `[.., S]`; 0 is the best, and the earlier of equals."""
    by_rank = priority.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(priority.shape[-1], device=priority.device).expand_as(by_rank)
    return by_rank, torch.empty_like(by_rank).scatter_(-1, by_rank, ranks)


def pool_at_end(priority: Tensor, *, sinks: int, window: int, pool: int) -> Tensor:
    """The entries that the pool keeps at the last query, `[.., S]` bool, from priorities `[.., S]`, by one sort."""
    length = priority.shape[-1]
    kept = torch.zeros(priority.shape, dtype=torch.bool, device=priority.device)
    stop = max(sinks, length - window)
    best = priority[..., sinks:stop].argsort(dim=-1, descending=True, stable=True)[..., :pool]
    return kept.scatter_(-1, best + sinks, True)
