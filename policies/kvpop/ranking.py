"""KVpop's ranking: scores that fall with age, and the pool that it keeps at every query.

Positions count from 0. At query q the sinks are 0 .. sinks - 1, the window is (q - window, q], q itself included, and
`E(q) = {t : sinks <= t <= q - window}` competes for the pool; `t_new = q - window` joins it. Age enters as
`(q - t) · log gamma`, so that the order at every q is that of the static priority `r_t - t · log gamma`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from evictbench.policy.deadlines import NEVER

GAMMA = (0.999, 0.999999)
"""What each KV head's decay stays between (arXiv 2607.05061 v2)."""


def bounded_log_gamma(raw: Tensor) -> Tensor:
    """`log gamma` from an unbounded parameter, in float32, inside the logarithms of `GAMMA` whatever it is."""
    low, high = math.log(GAMMA[0]), math.log(GAMMA[1])
    return (low + (high - low) * raw.float().sigmoid()).clamp(low, high)


def priority(score: Tensor, log_gamma: Tensor, positions: Tensor | None = None) -> Tensor:
    """The static priority, float32. score: `[.., S]`; log_gamma: broadcastable to `[..]`; positions: broadcastable to
    `[.., S]`, None: 0 .. S - 1."""
    if positions is None:
        positions = torch.arange(score.shape[-1], device=score.device)
    return score.float() - positions.float() * log_gamma.float()[..., None]


@dataclass(frozen=True)
class Boundaries:
    """At every query: boundary `[.., S]` int64, the position of the worst entry that the pool keeps of E(q), -1 where
    E(q) fits; keeps_new `[.., S]` bool, whether t_new is kept (false where nothing joins)."""

    boundary: Tensor
    keeps_new: Tensor


def boundaries(priority: Tensor, *, sinks: int, window: int, pool: int) -> Boundaries:
    """The pool's worst entry at every query of a sequence of priorities `[.., S]`; of equals the earlier position is
    kept. O(S log S)."""
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


def sequence_deadlines(priority: Tensor, *, sinks: int, window: int, pool: int) -> Tensor:
    """The first query that no longer sees each token of a whole sequence, `[.., S]` int64, the query after its last
    token included; NEVER where all do. The worst rank that is kept only improves, so that one search a token finds when
    it has passed. O(S log S)."""
    length = priority.shape[-1]
    _, ranks = _ranked(priority.detach())
    positions = torch.arange(length, device=priority.device)
    full = first_full(length + 1, sinks, window, pool)
    if length < full:
        return torch.full(priority.shape, NEVER, device=priority.device)
    worst = worst_kept(ranks, length + 1, sinks=sinks, window=window, pool=pool)
    passed = torch.searchsorted((-worst).contiguous(), (-ranks).contiguous(), right=True)
    deadline = torch.maximum(full + passed, positions + window)
    return deadline.masked_fill((positions < sinks) | (deadline > length), NEVER)


def first_full(queries: int, sinks: int, window: int, pool: int) -> int:
    """The first query at which E(q) does not fit the pool; `queries` where it always does."""
    return min(queries, sinks + window + pool)


def worst_kept(ranks: Tensor, queries: int, *, sinks: int, window: int, pool: int) -> Tensor:
    """The rank of the worst entry that the pool keeps of E(q), at each query from `first_full` to `queries - 1`: the
    pool-th smallest of each prefix of the distinct ranks `[.., S]`, 0 the best; -1 where the pool keeps nothing."""
    full = first_full(queries, sinks, window, pool)
    ends = torch.arange(full, queries, device=ranks.device) - window - sinks + 1
    ends = ends.expand(*ranks.shape[:-1], -1)
    if pool < 1:
        return torch.full_like(ends, -1)
    return kth_of_prefixes(ranks[..., sinks : queries - window], ends, pool - 1, ranks.shape[-1])


def kth_of_prefixes(values: Tensor, ends: Tensor, k: int, above: int) -> Tensor:
    """The k-th smallest, from 0, of the first `ends` `[.., queries]` of `values` `[.., n]`, whole and in [0, above).

    A wavelet matrix: the values are parted by their bits, the highest first, each time keeping their order, and every
    prefix is followed into the half in which its k-th smallest lies. O((n + queries) log above), no loop over either.
    """
    begin, end = torch.zeros_like(ends), ends
    left = torch.full_like(ends, k)
    found = torch.zeros_like(ends)
    for bit in range(max(1, (above - 1).bit_length()) - 1, -1, -1):
        ones = (values >> bit) & 1
        zeros_before = torch.nn.functional.pad((1 - ones).cumsum(-1), (1, 0))
        zeros = zeros_before[..., -1:]
        low, high = zeros_before.gather(-1, begin), zeros_before.gather(-1, end)
        upper = left >= high - low
        begin = torch.where(upper, zeros + begin - low, low)
        end = torch.where(upper, zeros + end - high, high)
        left = torch.where(upper, left - (high - low), left)
        found = found + (upper.long() << bit)
        place = torch.where(ones.bool(), zeros + ones.cumsum(-1) - 1, zeros_before[..., :-1])
        values = torch.empty_like(values).scatter_(-1, place, values)
    return found


def _ranked(priority: Tensor) -> tuple[Tensor, Tensor]:
    """Positions by rank, and the rank of each position; 0 the best, of equals the earlier."""
    by_rank = priority.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(priority.shape[-1], device=priority.device).expand_as(by_rank)
    return by_rank, torch.empty_like(by_rank).scatter_(-1, by_rank, places)


def pool_at_end(priority: Tensor, *, sinks: int, window: int, pool: int) -> Tensor:
    """Which of E(S - 1) the pool keeps at the last query: `[.., S]` bool. One sort for a whole sequence."""
    length = priority.shape[-1]
    kept = torch.zeros(priority.shape, dtype=torch.bool, device=priority.device)
    stop = max(sinks, length - window)
    best = priority[..., sinks:stop].argsort(dim=-1, descending=True, stable=True)[..., :pool]
    return kept.scatter_(-1, best + sinks, True)
