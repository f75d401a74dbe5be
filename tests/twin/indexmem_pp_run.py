"""A whole model under IndexMem++, as its definitions in `twin.indexmem_pp` have it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twin.indexmem_pp import Centroid, Pool, absorb, aged, competing, fill_by_mass, lloyd, means, ranked
from twin.model import DenseModel

ScoreAndRate = Callable[[int, int, int, Tensor], tuple[float, float]]
"""(layer, kv_head, position, what attention receives `[hidden]`): score and rate of a token."""

Starts = Callable[[int, int, int], Sequence[int]]
"""(layer, kv_head, evicted): where the clusters of a prompt's evicted entries start, as indices into them."""

Head = tuple[int, int]


@dataclass(frozen=True)
class Rules:
    """How to run it. context: how many tokens are compressed first. budget: entries that a head's query sees, sinks,
    window and centroids included, on average; or a share of the context, or of all that has been read if that is more.

    floor: places of the pool that each head has at least; None: a quarter of an equal share.
    """

    context: int
    budget: int | float
    sinks: int = 4
    window: int = 32
    centroids: int = 0
    budgets: Literal["mass", "uniform"] = "mass"
    floor: int | None = None
    prefill: Literal["native", "dense", "bounded"] = "native"
    deadlines: Literal["exact", "chunk_middle"] = "exact"

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
    def places(self) -> int:
        """Of each head's pool at the end of the context, where all have the same."""
        return self.at(0) - self.sinks - self.window - self.slots

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
                attended = torch.zeros(len(tokens), self.dense.heads, self.dense.head_dim, dtype=torch.float64)
                for q in positions:
                    for kv_head in range(self.dense.kv_heads):
                        at = layer, kv_head
                        self.turn(at, q)
                        self.seen[q][at] = self.visible(at, q)
                        self.counts[q][at] = [c.count for c in self.centroids[at]] if self.compressed else []
                        for head in range(kv_head * self.dense.group, (kv_head + 1) * self.dense.group):
                            attended[q - start, head] = self.attend(at, head, q)
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
                self.scores[at].append(score)
                self.rates[at].append(rate)

    def turn(self, at: Head, q: int) -> None:
        """The recursion; what goes joins the centroids before q looks."""
        if self.rules.whole and not self.compressed:
            return
        pool = self.pools[at]
        pool.places = self.places[at] + self.rules.at(q + 1 if self.compressed else 0) - self.rules.at(0)
        approximate = self.rules.deadlines == "chunk_middle" and not self.compressed and q > 0
        for j in pool.turn(q, self.middles[q - 1] if approximate else None):
            if self.compressed or self.rules.bounded:
                absorb(self.centroids[at], self.rules.slots, self.keys[at][j], self.values[at][j])

    def visible(self, at: Head, q: int) -> list[int]:
        if self.rules.whole and not self.compressed:
            return list(range(q + 1))
        return self.pools[at].sees(q)

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

    # The context's end.

    def compress(self, layer: int, q: int) -> None:
        """Budgets over all that is stored, then what each head keeps of it, and the rest to its centroids."""
        rules = self.rules
        choices, masses, pinned = [], [], []
        for kv_head in range(self.dense.kv_heads):
            at = layer, kv_head
            stored = self.stored(at, q)
            choice = ranked(
                self.scores[at],
                self.rates[at],
                q,
                [j for j in stored if j in set(competing(q, rules.sinks, rules.window))],
            )
            heads = range(kv_head * self.dense.group, (kv_head + 1) * self.dense.group)
            by_head = [self.softmax(layer, head, q, self.keys[at][stored], [0.0] * len(stored)) for head in heads]
            mass = dict(zip(stored, torch.stack(by_head).mean(0).tolist(), strict=True))
            choices.append(choice)
            masses.append([mass[j] for j in choice])
            pinned.append(sum(mass[j] for j in stored if j not in set(choice)))
        for kv_head, places in enumerate(self.allocate(masses, pinned)):
            self.cut((layer, kv_head), choices[kv_head], places)

    def stored(self, at: Head, q: int) -> list[int]:
        return self.pools[at].sees(q) if self.rules.bounded else list(range(q + 1))

    def allocate(self, masses: list[list[float]], pinned: list[float]) -> list[int]:
        heads, places = len(masses), self.rules.places
        if self.rules.budgets == "uniform" or self.rules.context <= self.rules.at(0) or self.rules.bounded:
            return [places] * heads
        floor = places // 4 if self.rules.floor is None else min(self.rules.floor, places)
        return fill_by_mass(masses, pinned, heads * places, [floor] * heads)

    def cut(self, at: Head, choice: list[int], places: int) -> None:
        pool = self.pools[at]
        self.places[at], pool.held[:] = places, choice[:places]
        gone = sorted(choice[places:])
        if not self.rules.bounded and self.rules.slots and gone:
            keys, values = self.keys[at][gone], self.values[at][gone]
            clusters = lloyd(keys, self.starts(*at, len(gone))[: self.rules.slots])
            self.centroids[at] = means(keys, values, clusters)
        if choice[places:] and choice[:places]:
            q = len(self.scores[at]) - 1
            edge = [aged(pool.scores, pool.rates, q, j) for j in choice[places - 1 : places + 1]]
            pool.gaps.append(edge[0] - edge[1])

    def told(self) -> Told:
        gaps = [gap for pool in self.pools.values() for gap in pool.gaps if gap > 0]
        return Told(torch.stack(self.logits), self.seen, self.counts, self.places, min(gaps, default=math.inf))
