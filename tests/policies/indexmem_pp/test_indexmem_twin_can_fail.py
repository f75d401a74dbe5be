"""Near misses of IndexMem++ that the comparison finds: each is a plausible reading, on either side, and wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from indexmem_cases import Case, cases
from indexmem_engine import ToldScores, check
from torch import Tensor
from twin_comparison import assert_found

from evictbench.policies.indexmem_pp import recursion
from evictbench.policy import HeadBudgets, NewEntries, PrefillChunk
from twin.indexmem_pp import Centroid, Pool, fill_by_mass, least_share, ranked
from twin.indexmem_pp_run import Rules, Run


class DecayIgnored(Run):
    """Scores that do not fade."""

    def enter(self, layer: int, hidden: Tensor, positions: range) -> None:
        super().enter(layer, hidden, positions)
        for kv_head in range(self.dense.kv_heads):
            self.rates[layer, kv_head][:] = [0.0] * len(self.rates[layer, kv_head])


class LaterFavoured(Pool):
    """Of equals the earlier goes."""

    def turn(self, q: int, ranked_at: int | None = None) -> list[int]:
        real = self.scores
        self.scores = [score + 1e-6 * j for j, score in enumerate(real)]
        gone = super().turn(q, ranked_at)
        self.scores = real
        return gone


class TiesFavourLater(Run):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        for at, pool in self.pools.items():
            self.pools[at] = LaterFavoured(pool.scores, pool.rates, pool.sinks, pool.window, pool.places)


class BestOfAll(Pool):
    """What went may come back: the best of all that competes."""

    def turn(self, q: int, ranked_at: int | None = None) -> list[int]:
        before = {*self.held, q - self.window}
        competing = range(self.sinks, q - self.window + 1)
        self.held[:] = ranked(self.scores, self.rates, q if ranked_at is None else ranked_at, competing)[: self.places]
        return sorted(j for j in before if self.sinks <= j and j not in self.held)


class DroppedReturn(Run):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        for at, pool in self.pools.items():
            self.pools[at] = BestOfAll(pool.scores, pool.rates, pool.sinks, pool.window, pool.places)


class ChunkEdgeResets(Run):
    """Each part of the context begins with the best of all there is."""

    def turn(self, at: tuple[int, int], q: int) -> None:
        if not self.compressed and q == len(self.logits):
            pool = self.pools[at]
            competing = range(pool.sinks, q - pool.window)
            pool.held[:] = ranked(pool.scores, pool.rates, q, competing)[: pool.places]
        super().turn(at, q)


class NoBias(Run):
    """A centroid counts for one entry."""

    def softmax(self, layer: int, head: int, q: int, keys: Tensor, bias: Any) -> Tensor:
        return super().softmax(layer, head, q, keys, [0.0] * len(bias))


class NoCentroids(Run):
    """What goes is gone."""

    def attend(self, at: tuple[int, int], head: int, q: int) -> Tensor:
        kept, self.centroids[at] = self.centroids[at], []
        found = super().attend(at, head, q)
        self.centroids[at] = kept
        return found


class LateCentroids(Run):
    """What goes as a query comes is not in a centroid when it looks."""

    def attend(self, at: tuple[int, int], head: int, q: int) -> Tensor:
        kept = self.centroids[at]
        self.centroids[at] = [Centroid(c.key, c.value, n) for c, n in zip(kept, self.older(at, q), strict=False)]
        found = super().attend(at, head, q)
        self.centroids[at] = kept
        return found

    def older(self, at: tuple[int, int], q: int) -> list[int]:
        return self.counts[q - 1][at] if q > self.rules.context else [c.count for c in self.centroids[at]]


class NotCharged(Run):
    """Centroids come on top of the budget."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        for at, pool in self.pools.items():
            pool.places += self.rules.slots
            self.places[at] += self.rules.slots

    def allocate(self, layer: int, masses: list[list[float]], pinned: list[float]) -> list[int]:
        return [share + self.rules.slots for share in super().allocate(layer, masses, pinned)]


class Uniform(Run):
    """Equal budgets."""

    def allocate(self, layer: int, masses: list[list[float]], pinned: list[float]) -> list[int]:
        return [self.rules.share] * len(masses)


class MassOfThePoolAlone(Run):
    """What stays anyway is left out of the mass."""

    def allocate(self, layer: int, masses: list[list[float]], pinned: list[float]) -> list[int]:
        return super().allocate(layer, masses, [0.0] * len(pinned))


class EqualInThePrompt(Run):
    """Budgets are divided first, and the prompt's queries see an equal share all the same."""

    def divide(self, layer: int, q: int) -> None:
        super().divide(layer, q)
        for kv_head in range(self.dense.kv_heads):
            self.pools[layer, kv_head].places = self.rules.share


class CentroidsOffInThePrompt(Run):
    """The prompt's queries see as much less as there will be centroids."""

    def divide(self, layer: int, q: int) -> None:
        super().divide(layer, q)
        for kv_head in range(self.dense.kv_heads):
            self.pools[layer, kv_head].places -= self.rules.slots


class DividedByTheLastRanks(Run):
    """Budgets along the ranks of the last query."""

    def choice(self, at: tuple[int, int], q: int, ranked_at: int) -> list[int]:
        return super().choice(at, q, q)


class CutByTheMiddleRanks(Run):
    """What stays is what the middle query ranks best."""

    def choice(self, at: tuple[int, int], q: int, ranked_at: int) -> list[int]:
        return super().choice(at, q, self.rules.ranking_query)


class EachByItsOwnRanks(Run):
    """The prompt's queries rank by themselves."""

    def __init__(self, model: Any, scores: Any, rules: Rules, *given: Any) -> None:
        super().__init__(model, scores, replace(rules, deadlines="exact"), *given)


class NothingBeyondTheFloor(Run):
    """A head may stay at its floor."""

    def allocate(self, layer: int, masses: list[list[float]], pinned: list[float]) -> list[int]:
        rules, heads = self.rules, len(masses)
        if rules.budgets == "uniform" or rules.whole or rules.bounded:
            return super().allocate(layer, masses, pinned)
        floor = least_share(rules.at(0), rules.share, rules.slots, rules.floor)
        return fill_by_mass(masses, pinned, heads * rules.share, [floor] * heads)


class CutAmongTheSeen(Run):
    """Only what the last query still saw can be kept."""

    def stored(self, at: tuple[int, int], q: int) -> list[int]:
        return self.pools[at].sees(q)


class NoSink(Run):
    """The first token competes."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        for pool in self.pools.values():
            pool.sinks = max(0, pool.sinks - 1)


class OneMoreInTheWindow(Run):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        for pool in self.pools.values():
            pool.window += 1


class MeanOfMeans(Run):
    """What joins counts as much as all that did before."""

    def turn(self, at: tuple[int, int], q: int) -> None:
        before = [(c, c.key, c.value, c.count) for c in self.centroids[at]]
        super().turn(at, q)
        for centroid, key, value, count in before:
            if centroid.count == count + 1:
                newest = centroid.key * (count + 1) - key * count, centroid.value * (count + 1) - value * count
                centroid.key, centroid.value = (key + newest[0]) / 2, (value + newest[1]) / 2


class Faster(ToldScores):
    """Another length for the rate."""

    def features(self, entries: NewEntries) -> Mapping[str, Tensor]:
        return {"score": super().features(entries)["score"] * torch.tensor([1.0, 1.5])}


class HeadsSwapped(ToldScores):
    def features(self, entries: NewEntries) -> Mapping[str, Tensor]:
        return {"score": super().features(entries)["score"].flip(1)}


class LateExpiry(ToldScores):
    """Everything is seen by one query of the context too many."""

    def evicted_in_chunk(self, chunk: PrefillChunk) -> Tensor:
        ends: Tensor = super().evicted_in_chunk(chunk)
        return torch.where(ends < chunk.first + chunk.new, ends + 1, ends)


class FrozenRanks(ToldScores):
    """A chunk is ranked by its first query."""

    def evicted_in_chunk(self, chunk: PrefillChunk) -> Tensor:
        score, rate = chunk.state["score"].unbind(-1)
        frozen = recursion.effective(score, rate, chunk.first - chunk.positions)
        ends: Tensor = recursion.expiry(
            frozen,
            torch.zeros_like(rate),
            chunk.positions,
            first=chunk.first,
            new=chunk.new,
            capacity=chunk.capacity,
            sinks=self.sinks,
            window=self.window,
        )
        return ends


class RankedByMass(ToldScores):
    """Budgets along the mass itself."""

    def head_budgets(self, budgets: HeadBudgets) -> Tensor:
        mass = budgets.mass / budgets.mass.sum(-1, keepdim=True)
        capacity: Tensor = super().head_budgets(replace(budgets, mass=mass, scores=mass))
        return capacity


class OneCentroid(ToldScores):
    """All join the first."""

    def nearest_centroid(self, keys: Tensor, counts: Tensor, capacity: Tensor, evicted: Tensor) -> Tensor:
        return torch.zeros_like(super().nearest_centroid(keys, counts, capacity, evicted))


class CountsOfOne(ToldScores):
    """Clusters that do not say how many they are of."""

    def cluster(self, keys: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        keys, values, counts = super().cluster(keys, values, count)
        return keys, values, torch.ones_like(counts)


def in_chunks(case: Case) -> bool:
    """Whether the context is read in several chunks and cut on the way."""
    return case.context >= 2 * case.chunk and case.rules.prefill != "dense" and not case.rules.divides_first


def divided_by_mass_alone(case: Case) -> bool:
    """Whether heads get their budgets by mass, without a floor that leaves little to divide."""
    return case.rules.budgets == "mass" and case.rules.floor == 0 and case.kv_heads > 1


MOST_CASES = 200
"""The search ends at the first case that tells a wrong reading from the right one."""

DIVIDED: dict[str, Any] = {"scores": ("spread",), "prefill": ("native",), "prompt": ("divided",)}

RUNS: list[tuple[type[Run], dict[str, Any]]] = [
    (DecayIgnored, {"scores": ("spread",)}),
    (TiesFavourLater, {"scores": ("ties",)}),
    (DroppedReturn, {"scores": ("spread",)}),
    (ChunkEdgeResets, {"scores": ("spread",), "prefill": ("native", "bounded")}),
    (NoBias, {"centroids": (1, 2)}),
    (NoCentroids, {"centroids": (1, 2)}),
    (LateCentroids, {"centroids": (1, 2)}),
    (NotCharged, {"centroids": (1, 2)}),
    (Uniform, {}),
    (MassOfThePoolAlone, {}),
    (CutAmongTheSeen, {}),
    (NoSink, {}),
    (OneMoreInTheWindow, {}),
    (MeanOfMeans, {"centroids": (1, 2)}),
    (EqualInThePrompt, DIVIDED),
    (CentroidsOffInThePrompt, {**DIVIDED, "centroids": (1, 3)}),
    (DividedByTheLastRanks, DIVIDED),
    (CutByTheMiddleRanks, DIVIDED),
    (EachByItsOwnRanks, DIVIDED),
    (NothingBeyondTheFloor, DIVIDED),
]


@pytest.mark.parametrize(("run", "narrowed"), RUNS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_reading_is_found(run: type[Run], narrowed: dict[str, Any]) -> None:
    drawn = cases(**narrowed).filter(in_chunks) if run is ChunkEdgeResets else cases(**narrowed)
    assert_found(lambda case: check(case, run=run), given(case=drawn), MOST_CASES)


POLICIES = [Faster, HeadsSwapped, LateExpiry, FrozenRanks, RankedByMass, OneCentroid, CountsOfOne]


@pytest.mark.parametrize("wrong", POLICIES)
def test_a_wrong_policy_is_found(wrong: type[ToldScores]) -> None:
    drawn = cases(scores=("spread",), centroids=(1, 2, 3))
    if wrong is RankedByMass:
        drawn = cases(scores=("spread",), centroids=(0, 1)).filter(divided_by_mass_alone)
    assert_found(lambda case: check(case, wrong), given(case=drawn), MOST_CASES)
