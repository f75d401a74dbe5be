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
    """Run the pool over a sequence of priorities `[.., S]`: a newcomer takes the place of the pool's worst entry if it
    is better; of equals the earlier position is kept. O(pool) a token, on ranks that one sort has made distinct."""
    length = priority.shape[-1]
    flat = priority.detach().reshape(-1, length)
    boundary = torch.full(flat.shape, -1, dtype=torch.int64, device=flat.device)
    keeps_new = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
    first = sinks + window  # the query at which the first entry joins
    full = min(length, first + pool)  # the first query at which one has to go
    keeps_new[:, first:full] = True
    if length > full and pool > 0:
        by_rank = flat.argsort(dim=-1, descending=True, stable=True)
        ranks = torch.empty_like(by_rank).scatter_(
            -1, by_rank, torch.arange(length, device=flat.device).expand_as(by_rank)
        )
        held = ranks[:, sinks : sinks + pool].clone()
        newcomers = ranks.T.contiguous()
        worst_of = []
        for query in range(full, length):
            worst, place = held.max(-1, keepdim=True)
            held.scatter_(-1, place, torch.minimum(newcomers[query - window, :, None], worst))
            worst_of.append(held.amax(-1))
        worst_ranks = torch.stack(worst_of, dim=-1)
        boundary[:, full:] = by_rank.gather(-1, worst_ranks)
        keeps_new[:, full:] = ranks[:, full - window : length - window] <= worst_ranks
    return Boundaries(boundary.view_as(priority), keeps_new.view_as(priority))


def pool_at_end(priority: Tensor, *, sinks: int, window: int, pool: int) -> Tensor:
    """Which of E(S - 1) the pool keeps at the last query: `[.., S]` bool. One sort for a whole sequence."""
    length = priority.shape[-1]
    kept = torch.zeros(priority.shape, dtype=torch.bool, device=priority.device)
    stop = max(sinks, length - window)
    best = priority[..., sinks:stop].argsort(dim=-1, descending=True, stable=True)[..., :pool]
    return kept.scatter_(-1, best + sinks, True)
