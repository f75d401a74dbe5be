"""DistillCache from its definitions: features by explicit loops over whole attention matrices, the ranker, the cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from twin.cases import Case
from twin.rules import Cut, Rule, choose
from twin.tiny import VOCAB

if TYPE_CHECKING:
    from twin.rules import Moment
    from twin.simulate import Head, Record

RECENT = 64
"""The queries whose entropies an entry remembers."""

LEAST = 32
"""The smallest budget that a share comes to."""


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# Features -----------------------------------------------------------------------------------------


def features(record: Record, held: list[int], queries: range) -> dict[int, list[float]]:
    """Of each held position its [alpha, norm, sigma, entropy, place]; `queries` are those of the last forward.

    alpha: mean attention over layers, query heads and queries. norm: mean length of its values over layers and KV
    heads. sigma: variance over all (layer, query head) pairs of their mean attention. entropy: mean entropy of the
    last 64 queries of the text, weighted by their attention to it. place: 0 for the first held, 1 for the last.
    """
    found = {}
    for place, token in enumerate(held):
        masses = received(record, token, queries)
        alpha = mean(masses)
        sigma = mean([(mass - alpha) ** 2 for mass in masses])
        norm = mean([math.hypot(*value.tolist()) for values in record.values for value in values[token]])
        found[token] = [alpha, norm, sigma, entropy(record, token, queries.stop), place / max(1, len(held) - 1)]
    return found


def received(record: Record, token: int, queries: range) -> list[float]:
    """By (layer, query head): the mean attention of these queries to a token, those before it counting as zeros."""
    return [
        mean(head[queries.start : queries.stop, token].tolist()) for probs in record.probs for head in probs.unbind(0)
    ]


def entropy(record: Record, token: int, end: int) -> float:
    """Mean entropy of the last 64 queries before `end`, weighted by their attention to a token."""
    recent = range(max(0, end - RECENT), end)
    weights = {query: looked_at(record, query)[token] for query in recent}
    weighted = sum(weight * spread(record, query) for query, weight in weights.items())
    total = sum(weights.values())
    return weighted / total if total else 0.0


@lru_cache(maxsize=2000)
def looked_at(record: Record, query: int) -> list[float]:
    """A query's attention to each token of the text: mean over layers and query heads."""
    heads = [head[query].tolist() for probs in record.probs for head in probs.unbind(0)]
    return [mean(list(column)) for column in zip(*heads, strict=True)]


@lru_cache(maxsize=2000)
def spread(record: Record, query: int) -> float:
    """Entropy in nats of a query's own attention over the keys that it saw: mean over layers and query heads."""
    heads = [head[query].tolist() for probs in record.probs for head in probs.unbind(0)]
    return mean([-sum(p * math.log(p) for p in head if p > 0) for head in heads])


# The ranker ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ranker:
    """Logarithms of alpha + 1e-8, norm + 1e-6 and sigma + 1e-14; minus shift, over scale; two layers of units, each
    normalised (with a weight and a bias a unit) and cut off below 0; a score."""

    shift: Tensor
    scale: Tensor
    hidden: tuple[tuple[Tensor, Tensor, Tensor, Tensor], ...]  # matrix, bias, weight and bias of the normalisation
    last: Tensor
    bias: Tensor

    def score(self, numbers: list[float]) -> float:
        alpha, norm, sigma, entropy, place = numbers
        prepared = [math.log(alpha + 1e-8), math.log(norm + 1e-6), math.log(sigma + 1e-14), entropy, place]
        units = (torch.tensor(prepared, dtype=torch.float64) - self.shift) / self.scale
        for matrix, bias, weight, shift in self.hidden:
            units = matrix @ units + bias
            away = units - units.mean()
            units = away / torch.sqrt((away**2).mean() + 1e-5) * weight + shift
            units = torch.where(units > 0, units, 0.0)
        return (self.last @ units + self.bias).item()


@lru_cache(maxsize=100)
def random_ranker(seed: int, equal: bool = False, width: int = 128) -> Ranker:
    """The same for the same arguments; representable in float32. `equal`: every entry gets the same score."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, gain: float = 1.0) -> Tensor:
        return (gain * torch.randn(shape, generator=generator)).double()

    def layer(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            draw(width, size, gain=size**-0.5),
            draw(width, gain=0.3),
            (1 + draw(width, gain=0.2)).float().double(),
            draw(width, gain=0.3),
        )

    return Ranker(
        shift=(torch.tensor([-3.5, 1.0, -7.0, 2.0, 0.5]) + draw(5, gain=0.25)).float().double(),
        scale=torch.tensor([1.0, 0.3, 1.5, 0.5, 0.3]).double(),
        hidden=(layer(5), layer(width)),
        last=draw(width, gain=0.0 if equal else 1.0),
        bias=draw(),
    )


# The cut ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DistillCache(Rule):
    """After every forward the best entries stay, the same ones in every layer and head; nothing is protected.

    `length`: what a share of the budget is a share of: the tokens "seen", or those in the "cache" with the last
    forward's own, which is algorithm 1 to the letter. `heads`: "hybrid", a fifth of the KV heads keeps everything and
    the others so little that the mean is the budget.
    """

    weights_seed: int = 0
    equal: bool = False
    length: Literal["seen", "cache"] = "seen"
    heads: Literal["shared", "hybrid"] = "shared"

    name = "distillcache"
    shares = "model"

    @property
    def ranker(self) -> Ranker:
        return random_ranker(self.weights_seed, self.equal)

    def cut(self, record: Record, moment: Moment) -> list[Cut]:
        kv_heads = record.dense.kv_heads
        if self.heads == "hybrid":
            together = _hybrid(self, record, range(moment.first, moment.next_query), moment.budget)
            return [together[moment.layer, kv_head] for kv_head in range(kv_heads)]
        held, budget = record.held[moment.layer][0], moment.budget
        if self.length == "cache" and moment.share is not None:
            budget = max(LEAST, math.floor(moment.share * len(held)))
        if len(held) + 1 <= budget:
            return [Cut(list(held))] * kv_heads
        return [self.select(record, tuple(held), range(moment.first, moment.next_query), budget - 1)] * kv_heads

    def select(self, record: Record, held: tuple[int, ...], queries: range, count: int) -> Cut:
        return _chosen(self, record, held, queries, count)


@lru_cache(maxsize=16)
def _chosen(rule: DistillCache, record: Record, held: tuple[int, ...], queries: range, count: int) -> Cut:
    """Kept for the layers, which ask one after another."""
    numbers = features(record, list(held), queries)
    return choose({token: rule.ranker.score(numbers[token]) for token in held}, count)


@lru_cache(maxsize=1)
def _hybrid(rule: DistillCache, record: Record, queries: range, budget: int) -> dict[Head, Cut]:
    """What each (layer, kv_head) keeps; decided before any of them has been cut, and kept for those that ask later."""
    held = {
        (layer, kv_head): positions
        for layer, heads in enumerate(record.held)
        for kv_head, positions in enumerate(heads)
    }
    fifth, seen = len(held) // 5, queries.stop
    visible = min(held.values(), key=len)
    count = (budget * len(held) - (seen + 1) * fifth) // (len(held) - fifth) - 1
    if len(visible) <= count:
        return {head: Cut(list(positions)) for head, positions in held.items()}
    cut = rule.select(record, tuple(visible), queries, count)
    if len(visible) < seen:
        whole, gap = [head for head, positions in held.items() if len(positions) == seen], math.inf
    else:
        lost = [token for token in visible if token not in cut.kept]
        given = {head: sum(_given(record, head, token, queries) for token in lost) for head in held}
        ranked = sorted(held, key=lambda head: (-given[head], head))
        whole = ranked[:fifth]
        gap = given[ranked[fifth - 1]] - given[ranked[fifth]] if fifth else math.inf
    return {
        head: Cut(list(positions)) if head in whole else Cut(cut.kept, min(cut.gap, gap))
        for head, positions in held.items()
    }


def _given(record: Record, head: Head, token: int, queries: range) -> float:
    """The attention that a KV head's queries gave to a token."""
    layer, kv_head = head
    mine = record.probs[layer][record.heads_of(kv_head), queries.start : queries.stop, token]
    return mine.sum().item()


@st.composite
def distillcache_cases(draw: st.DrawFn, long: bool = False, hybrid: bool = False) -> Case:
    """Texts, models, rankers, budgets and all the ways to run them. `long`: of more tokens than the ring has queries.

    Shares come to 32 entries at least.
    """
    share = hybrid or draw(st.booleans())
    if long:
        length = draw(st.integers(RECENT - 4, RECENT + 16))
    elif share:
        length = draw(st.one_of(st.integers(36, 72), st.integers(1, 72)))
    else:
        length = draw(st.one_of(st.integers(20, 40), st.integers(1, 40)))
    kv_heads, groups = draw(st.sampled_from([(2, 2), (2, 3), (1, 4), (4, 1)]))
    token = st.integers(0, VOCAB - 1)
    new_tokens = draw(st.integers(0, 10))
    given = draw(st.booleans())
    shares = [0.25, 0.5, 0.6, 0.9] if hybrid else [0.5, 0.75, 0.9, 1.0]
    amounts = st.sampled_from(shares) if share else st.one_of(st.integers(1, 48), st.integers(8, 20), st.integers(1, 3))
    return Case(
        rule=DistillCache(
            weights_seed=draw(st.integers(0, 9)),
            equal=draw(st.integers(0, 5)) == 5,
            length="seen" if hybrid else draw(st.sampled_from(["seen", "cache"])),
            heads="hybrid" if hybrid else "shared",
        ),
        kind=draw(st.sampled_from(["llama", "qwen3"])),
        model_seed=draw(st.integers(0, 3)),
        layers=draw(st.sampled_from([2, 3])),
        kv_heads=kv_heads,
        groups=groups,
        tied=draw(st.booleans()),
        flat=False,
        prompt=tuple(draw(st.lists(token, min_size=length, max_size=length))),
        new_tokens=tuple(draw(st.lists(token, min_size=new_tokens, max_size=new_tokens))) if given else new_tokens,
        budget=draw(amounts),
        prefill=draw(st.sampled_from(["native", "dense", "bounded"])),
        chunk=draw(st.one_of(st.integers(1, 16), st.integers(16, 80))),
        border=draw(st.one_of(st.none(), st.integers(1, length - 1))) if length > 1 else None,
    )
