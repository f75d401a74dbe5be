"""IndexMem++ as the authors' code has it (Chooovy/kvpress at 5a5826ed): scorer, pool, head budgets, centroids.

One head, one query, one entry at a time, in float64. tests/authors holds it to numbers that their code made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# The scorer.


def score_and_rate(weights: Mapping[str, Tensor], hidden: Tensor, position: int, kv_head: int) -> tuple[float, float]:
    """Of one token, from what its layer's attention receives, `[hidden]`. weights: of one layer, float64."""

    def normed(vector: Tensor, name: str) -> Tensor:
        centred = vector - vector.mean()
        spread = (centred.pow(2).mean() + 1e-5).sqrt()
        return centred / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    inner = normed(weights["narrow.weight"] @ normed(hidden, "input_norm"), "width_norm")
    inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    score = float(weights["to_score.weight"][kv_head] @ inner) + 1e-6 * position
    raw = float(weights["to_rate.weight"][kv_head] @ inner + weights["to_rate.bias"][kv_head])
    return score, -(max(raw, 0.0) + math.log1p(math.exp(-abs(raw))))


# Ranking and recursion, of one head.


def aged(scores: Sequence[float], rates: Sequence[float], q: int, j: int) -> float:
    """The score of key j for the query at q, which may also come before it: a straight line."""
    return scores[j] + rates[j] * (q - j) / 16384


def competing(q: int, sinks: int, window: int) -> list[int]:
    """The keys that query q sees only if they were chosen."""
    return [j for j in range(q + 1) if j >= sinks and j <= q - window]


def ranked(scores: Sequence[float], rates: Sequence[float], q: int, keys: Sequence[int]) -> list[int]:
    """Best first; of equals the earlier first."""
    return sorted(keys, key=lambda j: (-aged(scores, rates, q, j), j))


@dataclass
class Pool:
    """What one head holds beside sinks and window, as queries pass. gaps: how close its decisions were."""

    scores: Sequence[float]
    rates: Sequence[float]
    sinks: int
    window: int
    places: int
    held: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def turn(self, q: int, ranked_at: int | None = None) -> list[int]:
        """What goes as query q comes: the token at q - window joins, and the worst goes if it is one too many.

        ranked_at: the query whose scores decide, where it is another.
        """
        if q - self.window >= self.sinks:
            self.held.append(q - self.window)
        gone = []
        while len(self.held) > self.places:
            order = ranked(self.scores, self.rates, q if ranked_at is None else ranked_at, self.held)
            gone.append(order[-1])
            self.held.remove(order[-1])
            if len(order) > 1:
                scores = [aged(self.scores, self.rates, q if ranked_at is None else ranked_at, j) for j in order[-2:]]
                self.gaps.append(scores[0] - scores[1])
        return gone

    def sees(self, q: int) -> list[int]:
        """The positions that query q sees, after its turn."""
        return sorted({*(j for j in range(q + 1) if j < self.sinks or j > q - self.window), *self.held})


def expiry(pools: Sequence[Sequence[int]], sinks: int, window: int) -> list[float]:
    """By key: the first query that may no longer see it, from what is held in the pool at each query."""
    found: list[float] = []
    for j in range(len(pools)):
        without = [q for q in range(len(pools)) if j >= sinks and q >= j + window and j not in pools[q]]
        found.append(min(without, default=math.inf))
    return found


# Head budgets.


def least_share(budget: int, unprotected: int, slots: int, floor: int | None) -> int:
    """What a head has at least beside sinks and window. floor: as set; None: a quarter of the budget, which is what
    their recorded runs state, and at most half of what there is. Centroids need their slots."""
    wanted = min(budget // 4, unprotected // 2) if floor is None else floor
    return max(min(wanted, unprotected), slots)


def divide_by_mass(masses: Sequence[Sequence[float]], pinned: Sequence[float], total: int, floor: int) -> list[int]:
    """The shares of the heads, as `mass_head_budgets` finds them.

    masses: what the last query gives each entry to choose from, best first; pinned: what it gives those that stay
    anyway. The mass that all retain is searched for, so that the entries that this takes are `total` in the end. Each
    head has one entry beyond its floor at least.
    """
    heads = len(masses)
    curves: list[list[float]] = []
    for head, stays in zip(masses, pinned, strict=True):
        sums = [stays]
        for mass in head:
            sums.append(sums[-1] + mass)
        curves.append(sums[1 + floor :])
    rest = total - floor * heads
    if rest <= heads:
        return [floor + (h < rest) for h in range(heads)]

    def taken(target: float) -> list[int]:
        return [next((k + 1 for k, mass in enumerate(curve) if mass >= target), len(curve)) for curve in curves]

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(taken(middle)) > rest else (middle, high)
    shares = taken(low)
    while sum(shares) < rest:
        gains = [curve[k] - curve[k - 1] if k < len(curve) else -1.0 for curve, k in zip(curves, shares, strict=True)]
        if max(gains) < 0:
            break
        shares[gains.index(max(gains))] += 1
    return [share + floor for share in shares]


def fill_by_mass(
    masses: Sequence[Sequence[float]], pinned: Sequence[float], total: int, floors: Sequence[int]
) -> list[int]:
    """The same without a search: each place goes to the head that has retained the least mass so far. floors: with the
    one entry beyond them."""
    places = [min(floor, len(head)) for floor, head in zip(floors, masses, strict=True)]
    while sum(places) < total:
        open_heads = [h for h, head in enumerate(masses) if places[h] < len(head)]
        if not open_heads:
            break
        poorest = min(open_heads, key=lambda h: pinned[h] + sum(masses[h][: places[h]]))
        places[poorest] += 1
    return places


# Centroids.


@dataclass
class Centroid:
    """The mean of some evicted entries."""

    key: Tensor
    value: Tensor
    count: int

    def take(self, key: Tensor, value: Tensor) -> None:
        """One entry more."""
        self.key = (self.key * self.count + key) / (self.count + 1)
        self.value = (self.value * self.count + value) / (self.count + 1)
        self.count += 1


def nearest(key: Tensor, centres: Sequence[Tensor]) -> int:
    """By Euclidean distance; of equals the first."""
    distances = [float((key - centre).pow(2).sum()) for centre in centres]
    return distances.index(min(distances))


def absorb(centroids: list[Centroid], slots: int, key: Tensor, value: Tensor) -> None:
    """One evicted entry: to a slot of its own while there is one, else to the nearest."""
    if len(centroids) < slots:
        centroids.append(Centroid(key, value, 1))
    elif centroids:
        centroids[nearest(key, [centroid.key for centroid in centroids])].take(key, value)


def lloyd(keys: Tensor, first: Sequence[int], iterations: int = 15) -> list[int]:
    """The cluster of each key `[n, head_dim]`. Clusters start at the keys `first`; an empty one stays where it is. What
    the last iteration finds is the result."""
    return lloyd_from(keys, [keys[i] for i in first], iterations)


def lloyd_from(keys: Tensor, centres: Sequence[Tensor], iterations: int = 15) -> list[int]:
    """`lloyd` from given centres."""
    centres, members = list(centres), [0] * len(keys)
    for _ in range(iterations):
        members = [nearest(key, centres) for key in keys]
        for c in range(len(centres)):
            of = [i for i, member in enumerate(members) if member == c]
            if of:
                centres[c] = keys[of].mean(0)
    return members


def means(keys: Tensor, values: Tensor, clusters: Sequence[int]) -> list[Centroid]:
    """Of the clusters that have members."""
    found = []
    for cluster in sorted(set(clusters)):
        of = [i for i, member in enumerate(clusters) if member == cluster]
        found.append(Centroid(keys[of].mean(0), values[of].mean(0), len(of)))
    return found
