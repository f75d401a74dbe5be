"""A whole model under IndexMem++, with the steps of `twin.indexmem_pp` in the order of the authors' code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twin.indexmem_pp import (
    Centroid,
    Pool,
    absorb,
    aged,
    competing,
    divide_by_mass,
    least_share,
    lloyd_from,
    means,
    ranked,
)
from twin.model import DenseModel

ScoreAndRate = Callable[[int, int, int, Tensor], tuple[float, float]]
"""(layer, kv_head, position, what attention receives `[hidden]`): score and rate of a token."""

Starts = Callable[[int, int, Sequence[int]], Sequence[int]]
"""(layer, kv_head, evicted positions): where the clusters of a prompt's evicted entries start, as positions."""

Head = tuple[int, int]


@dataclass(frozen=True)
class Rules:
    """How to run it. context: how many tokens are compressed first. budget: entries that a head's query sees, sinks,
    window and centroids included, on average; or a share of the context, or of all that has been read if that is more.

    floor: what each head has at least beside sinks and window; None: see `least_share`. prompt: what limits the
    context's queries natively, budgets "divided" before a layer attends or an "equal_share" less the centroids.
    deadlines: whether they are ranked by the "middle" query of their pass or each by itself, "exact"; None: middle
    where budgets are divided first. on_top: after the context a pass attends before anything leaves, so that it sees
    all that was held and its own entries on top of the budget, as in the authors' code; else each query is within the
    budget.
    """

    context: int
    budget: int | float
    sinks: int = 4
    window: int = 32
    centroids: int = 0
    budgets: Literal["mass", "uniform", "table"] = "mass"
    floor: int | None = None
    prefill: Literal["native", "dense", "bounded"] = "native"
    prompt: Literal["divided", "equal_share"] = "divided"
    deadlines: Literal["middle", "exact"] | None = None
    table: Sequence[Sequence[int]] | None = None
    on_top: bool = False

    def at(self, seen: int) -> int:
        """The budget of the query that is the `seen`-th token."""
        if isinstance(self.budget, int):
            return self.budget
        return max(32, math.floor(self.budget * max(self.context, seen)))

    @property
    def slots(self) -> int:
        """Centroids of a head: half of what is not protected where they would leave no place."""
        free = self.at(0) - self.sinks - self.window
        return self.centroids if self.centroids < free else max(0, (free - 1) // 2)

    @property
    def share(self) -> int:
        """What each head has beside sinks and window, centroids included, where all have the same."""
        return self.at(0) - self.sinks - self.window

    @property
    def places(self) -> int:
        """Of each head's pool at the end of the context, where all have the same."""
        return self.share - self.slots

    @property
    def divides_first(self) -> bool:
        """Budgets are divided before a layer attends to the context."""
        return self.prompt == "divided" and self.prefill == "native" and not self.whole

    @property
    def by_middle(self) -> bool:
        """What the context's queries see is ranked by a middle query."""
        return self.deadlines == "middle" or (self.deadlines is None and self.divides_first)

    @property
    def ranking_query(self) -> int:
        """The query whose ranks divide budgets."""
        middle = self.deadlines == "middle" or (self.deadlines is None and self.prompt == "divided")
        return self.context // 2 if middle else self.context - 1

    @property
    def whole(self) -> bool:
        """All of the context is seen while it is read."""
        return self.prefill == "dense" or self.context <= self.at(0)

    @property
    def bounded(self) -> bool:
        """What the context loses is gone."""
        return self.prefill == "bounded" and not self.whole


@dataclass
class Told:
    """What happened. seen: per query, the positions that each head saw; counts: likewise, the entries of each centroid.
    places: of each pool at the end of the context. closest: how nearly it could have been otherwise."""

    logits: Tensor
    seen: list[dict[Head, list[int]]]
    counts: list[dict[Head, list[int]]]
    places: dict[Head, int]
    closest: float


class Run:
    """One sequence: `read` its context, then what follows, in any parts; no part holds some of both."""

    def __init__(
        self, model: PreTrainedModel, score_and_rate: ScoreAndRate, rules: Rules, starts: Starts, length: int
    ) -> None:
        self.dense, self.score_and_rate, self.rules, self.starts = DenseModel(model), score_and_rate, rules, starts
        dense = self.dense
        self.everyone = [(layer, head) for layer in range(dense.layers) for head in range(dense.kv_heads)]
        self.keys = {at: torch.zeros(length, dense.head_dim, dtype=torch.float64) for at in self.everyone}
        self.values = {at: torch.zeros(length, dense.head_dim, dtype=torch.float64) for at in self.everyone}
        self.queries = [torch.zeros(length, dense.heads, dense.head_dim, dtype=torch.float64)] * dense.layers
        self.queries = [tensor.clone() for tensor in self.queries]
        self.scores: dict[Head, list[float]] = {at: [] for at in self.everyone}
        self.rates: dict[Head, list[float]] = {at: [] for at in self.everyone}
        self.pools = {
            at: Pool(self.scores[at], self.rates[at], rules.sinks, rules.window, rules.places) for at in self.everyone
        }
        self.centroids: dict[Head, list[Centroid]] = {at: [] for at in self.everyone}
        self.places = dict.fromkeys(self.everyone, rules.places)
        self.shares = dict.fromkeys(self.everyone, rules.share)
        self.middles: list[int] = []
        self.compressed = False
        self.logits: list[Tensor] = []
        self.seen: list[dict[Head, list[int]]] = []
        self.counts: list[dict[Head, list[int]]] = []

    def read(self, tokens: Sequence[int]) -> None:
        """One forward pass."""
        start = len(self.logits)
        positions = range(start, start + len(tokens))
        ends_context = positions[-1] + 1 == self.rules.context
        self.middles += [start + len(tokens) // 2 for _ in positions]
        self.seen += [{} for _ in positions]
        self.counts += [{} for _ in positions]
        with torch.no_grad():
            hidden = self.dense.embed(tokens)
            for layer in range(self.dense.layers):
                self.enter(layer, hidden, positions)
                if self.rules.divides_first and not self.compressed:
                    assert ends_context
                    assert start == 0
                    self.divide(layer, positions[-1])
                attended = torch.zeros(len(tokens), self.dense.heads, self.dense.head_dim, dtype=torch.float64)
                late = self.compressed and self.rules.on_top
                for q in positions:
                    for kv_head in range(self.dense.kv_heads):
                        at = layer, kv_head
                        if not late:
                            self.turn(at, q)
                        self.seen[q][at] = self.before(at, start, q) if late else self.visible(at, q)
                        self.counts[q][at] = [c.count for c in self.centroids[at]] if self.compressed else []
                        for head in range(kv_head * self.dense.group, (kv_head + 1) * self.dense.group):
                            attended[q - start, head] = self.attend(at, head, q)
                for q in positions if late else ():
                    for kv_head in range(self.dense.kv_heads):
                        self.turn((layer, kv_head), q)
                if ends_context:
                    self.compress(layer, positions[-1])
                hidden = self.dense.finish(layer, hidden, attended)
            self.logits += list(self.dense.logits(hidden))
        self.compressed = self.compressed or ends_context

    def enter(self, layer: int, hidden: Tensor, positions: range) -> None:
        queries, keys, values = self.dense.project(layer, hidden)
        queries, keys = self.dense.rotate(queries, positions), self.dense.rotate(keys, positions)
        received = self.dense.model.model.layers[layer].input_layernorm(hidden)
        here = slice(positions.start, positions.stop)
        self.queries[layer][here] = queries
        for kv_head in range(self.dense.kv_heads):
            at = layer, kv_head
            self.keys[at][here], self.values[at][here] = keys[:, kv_head], values[:, kv_head]
            for offset, position in enumerate(positions):
                score, rate = self.score_and_rate(layer, kv_head, position, received[offset])
                if self.compressed and self.rules.on_top:
                    # Their pass of several tokens adds a token's place in the pass twice.
                    score += offset * 1e-6 - rate * offset / 16384
                self.scores[at].append(score)
                self.rates[at].append(rate)

    def turn(self, at: Head, q: int) -> None:
        """The recursion; what goes joins the centroids before q looks."""
        if self.rules.whole and not self.compressed:
            return
        pool = self.pools[at]
        if self.compressed:
            pool.places = self.places[at] + self.rules.at(q + 1) - self.rules.at(0)
        approximate = self.rules.by_middle and not self.compressed and q > 0
        for j in pool.turn(q, self.middles[q - 1] if approximate else None):
            if self.compressed or self.rules.bounded:
                absorb(self.centroids[at], self.rules.slots, self.keys[at][j], self.values[at][j])

    def visible(self, at: Head, q: int) -> list[int]:
        if self.rules.whole and not self.compressed:
            return list(range(q + 1))
        return self.pools[at].sees(q)

    def before(self, at: Head, start: int, q: int) -> list[int]:
        """What a pass that begins at `start` found, and its own entries up to q."""
        return sorted({*self.pools[at].sees(start - 1), *range(start, q + 1)})

    def attend(self, at: Head, head: int, q: int) -> Tensor:
        """`[head_dim]`: one softmax over entries and centroids, which count for as many as they stand for."""
        seen = self.seen[q][at]
        keys, values, weights = list(self.keys[at][seen]), list(self.values[at][seen]), [0.0] * len(seen)
        if self.compressed:
            for centroid in self.centroids[at]:
                keys.append(centroid.key)
                values.append(centroid.value)
                weights.append(math.log(centroid.count))
        return self.softmax(at[0], head, q, torch.stack(keys), weights) @ torch.stack(values)

    def softmax(self, layer: int, head: int, q: int, keys: Tensor, bias: Sequence[float]) -> Tensor:
        scaling = self.dense.model.model.layers[layer].self_attn.scaling
        logits = keys @ self.queries[layer][q, head] * scaling + torch.tensor(bias, dtype=torch.float64)
        weights = torch.exp(logits - logits.max())
        return weights / weights.sum()

    # What each head has, and the context's end.

    def divide(self, layer: int, q: int) -> None:
        """The shares of a layer's heads, over all that is stored when q, the context's last query, comes."""
        choices, masses, pinned = [], [], []
        for kv_head in range(self.dense.kv_heads):
            at = layer, kv_head
            stored = self.stored(at, q)
            choice = self.choice(at, q, self.rules.ranking_query)
            heads = range(kv_head * self.dense.group, (kv_head + 1) * self.dense.group)
            by_head = [self.softmax(layer, head, q, self.keys[at][stored], [0.0] * len(stored)) for head in heads]
            mass = dict(zip(stored, torch.stack(by_head).mean(0).tolist(), strict=True))
            choices.append(choice)
            masses.append([mass[j] for j in choice])
            pinned.append(sum(mass[j] for j in stored if j not in set(choice)))
        for kv_head, share in enumerate(self.allocate(layer, masses, pinned)):
            self.shares[layer, kv_head] = self.pools[layer, kv_head].places = share

    def choice(self, at: Head, q: int, ranked_at: int) -> list[int]:
        """What the last query q may see only if it is chosen, best first."""
        free = set(competing(q, self.rules.sinks, self.rules.window))
        return ranked(self.scores[at], self.rates[at], ranked_at, [j for j in self.stored(at, q) if j in free])

    def compress(self, layer: int, q: int) -> None:
        """What each head keeps of all that is stored; the rest goes to its centroids, which come off its share."""
        if not self.rules.divides_first:
            self.divide(layer, q)
        for kv_head in range(self.dense.kv_heads):
            at = layer, kv_head
            self.cut(at, self.choice(at, q, q), self.shares[at] - self.rules.slots)

    def stored(self, at: Head, q: int) -> list[int]:
        return self.pools[at].sees(q) if self.rules.bounded else list(range(q + 1))

    def allocate(self, layer: int, masses: list[list[float]], pinned: list[float]) -> list[int]:
        rules, heads = self.rules, len(masses)
        if rules.budgets == "table":
            assert rules.table is not None
            return [budget - rules.sinks - rules.window for budget in rules.table[layer]]
        if rules.budgets == "uniform" or rules.context <= rules.at(0) or rules.bounded:
            return [rules.share] * heads
        floor = least_share(rules.at(0), rules.share, rules.slots, rules.floor)
        return divide_by_mass(masses, pinned, heads * rules.share, floor)

    def cut(self, at: Head, choice: list[int], places: int) -> None:
        pool = self.pools[at]
        self.places[at], pool.held[:] = places, choice[:places]
        gone = sorted(choice[places:])
        if not self.rules.bounded and self.rules.slots and gone:
            keys, values = self.keys[at][gone], self.values[at][gone]
            first = self.starts(*at, gone)[: self.rules.slots]
            self.centroids[at] = means(keys, values, lloyd_from(keys, [self.keys[at][j] for j in first]))
        if choice[places:] and choice[:places]:
            q = len(self.scores[at]) - 1
            edge = [aged(pool.scores, pool.rates, q, j) for j in choice[places - 1 : places + 1]]
            pool.gaps.append(edge[0] - edge[1])

    def told(self) -> Told:
        gaps = [gap for pool in self.pools.values() for gap in pool.gaps if gap > 0]
        return Told(torch.stack(self.logits), self.seen, self.counts, self.places, min(gaps, default=math.inf))
