"""The eviction rules, each from its definition.

A rule answers one question: at this moment, which of the held positions of a layer does each KV head keep?
It answers from the record of all that has happened and keeps no state. Of equal scores the earlier is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from twin.simulate import Record

Group = Literal["mean", "max", "sum"]
Shares = Literal["head", "layer", "model"]
Stage = Literal["prompt", "question", "decode"]


@dataclass(frozen=True)
class Moment:
    """When a rule is asked.

    `next_query`: the position whose visibility the cut must guarantee; also the number of tokens seen so far.
    `budget`: how many entries that query may see, itself included; `share`: the share of the text that it comes from.
    `first`: the first query that attended since the last time the rule was asked.
    """

    layer: int
    next_query: int
    budget: int
    stage: Stage
    first: int = 0
    share: float | None = None


@dataclass(frozen=True)
class Cut:
    """What a KV head keeps, ascending, and by how much the worst one kept beat the best one dropped."""

    kept: list[int]
    gap: float = math.inf


def choose(scores: dict[int, float], count: int) -> Cut:
    """The `count` positions with the highest scores; of equals, the earlier ones."""
    ranked = sorted(scores, key=lambda position: (-scores[position], position))
    count = max(count, 0)
    gap = math.inf
    if 0 < count < len(ranked):
        gap = scores[ranked[count - 1]] - scores[ranked[count]]
    return Cut(sorted(ranked[:count]), gap)


def reduce_group(values: Tensor, group: Group) -> Tensor:
    """Over the query heads that share a KV head, the first dimension."""
    if group == "mean":
        return values.mean(0)
    if group == "sum":
        return values.sum(0)
    if group == "max":
        return values.max(0).values
    raise ValueError(f"no group reduction {group!r}")


class Rule:
    """What all rules answer to."""

    name: str
    # True: evict after every single token, whatever the chunk. False: after a whole forward.
    token_at_a_time = False
    # True: RoPE positions count the entries in the cache instead of the tokens of the text.
    reindexed = False
    # "model": what one layer keeps every layer keeps, decided once all of them have attended.
    shares: Shares = "head"

    @property
    def least_budget(self) -> int:
        """The smallest budget under which the rule has a meaning."""
        return 1

    def cut(self, record: Record, moment: Moment) -> list[Cut]:
        """One `Cut` per KV head of the layer; called after every token or every forward that may evict."""
        raise NotImplementedError


@dataclass(frozen=True)
class Full(Rule):
    """Nothing is evicted."""

    name = "full"

    def cut(self, record: Record, moment: Moment) -> list[Cut]:
        return [Cut(list(held)) for held in record.held[moment.layer]]


@dataclass(frozen=True)
class Random(Rule):
    """Static priorities: sinks and the recent window stay, of the rest the lowest priority goes first."""

    priority: Callable[[int, int, int, int], float]  # (seed, layer, kv_head, position) -> [0, 1)
    seed: int = 0
    sinks: int = 4
    recent: int = 32

    name = "random"
    token_at_a_time = True

    @property
    def least_budget(self) -> int:
        return self.sinks + self.recent + 1

    def cut(self, record: Record, moment: Moment) -> list[Cut]:
        cuts = []
        for kv_head, held in enumerate(record.held[moment.layer]):
            kept = list(held)
            gap = math.inf
            while len(kept) + 1 > moment.budget:
                pool = {
                    position: self.priority(self.seed, moment.layer, kv_head, position)
                    for position in kept
                    if position >= self.sinks and not position > moment.next_query - self.recent
                }
                survivors = choose(pool, len(pool) - 1)
                (lost,) = set(pool) - set(survivors.kept)
                kept.remove(lost)
                gap = min(gap, survivors.gap)
            cuts.append(Cut(kept, gap))
        return cuts


@dataclass(frozen=True)
class StreamingLLM(Rule):
    """The first `sinks` positions and the last budget - sinks, the query itself among them."""

    sinks: int = 4
    positions: Literal["reindexed", "original"] = "reindexed"

    name = "streaming_llm"
    token_at_a_time = True

    @property
    def reindexed(self) -> bool:  # type: ignore[override]
        return self.positions == "reindexed"

    @property
    def least_budget(self) -> int:
        return self.sinks + 1

    def cut(self, record: Record, moment: Moment) -> list[Cut]:
        cuts = []
        for held in record.held[moment.layer]:
            window = moment.budget - self.sinks
            cuts.append(Cut([p for p in held if p < self.sinks or p > moment.next_query - window]))
        return cuts


@dataclass(frozen=True)
class TOVA(Rule):
    """The last query's probabilities, averaged over all query heads of the layer: one set for the layer."""

    name = "tova"

    def cut(self, record: Record, moment: Moment) -> list[Cut]:
        held = record.held[moment.layer][0]
        if len(held) + 1 <= moment.budget:
            cut = Cut(list(held))
        else:
            last_query = moment.next_query - 1
            scores = {}
            for position in held:
                by_head = [probs[last_query, position].item() for probs in record.probs[moment.layer]]
                scores[position] = sum(by_head) / len(by_head)
            cut = choose(scores, moment.budget - 1)
        return [cut] * len(record.held[moment.layer])


@dataclass(frozen=True)
class H2O(Rule):
    """Half of the budget the most recent, half the heaviest by attention received so far: by each KV head, or by all
    together that share a kept set."""

    group: Group = "mean"
    shares: Shares = "head"

    name = "h2o"

    def cut(self, record: Record, moment: Moment) -> list[Cut]:
        recent = moment.budget // 2
        cuts = []
        for kv_head, held in enumerate(record.held[moment.layer]):
            if len(held) + 1 <= moment.budget:
                cuts.append(Cut(list(held)))
                continue
            protected = [p for p in held if p > moment.next_query - recent]
            scores = {}
            for position in held:
                if position not in protected:
                    scores[position] = 0.0
                    for layer, head in record.sharers(self.shares, moment.layer, kv_head):
                        received = record.probs[layer][record.heads_of(head), :, position].sum(-1)
                        scores[position] += reduce_group(received, self.group).item()
            heavy = choose(scores, moment.budget - 1 - len(protected))
            cuts.append(Cut(sorted(heavy.kept + protected), heavy.gap))
        return cuts


@dataclass(frozen=True)
class SnapKV(Rule):
    """What the last `window` queries look at among the held keys, in all heads together that share a kept set, smoothed
    along the positions.

    `decode="append"`: cut to the budget in the prompt, then never again.
    `decode="reselect"`: when full, cut. With `votes="window"` to budget - i, where i = min(128, budget // 8) and at
    least 1. With `votes="running"` to budget - 1; behind the prompt, what a query gave an entry counts (1 - 1 / window)
    ** n when n queries have followed, the votes at the prompt's end among it, and nothing is smoothed.
    """

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "avg"] = "max"
    group: Group = "mean"
    decode: Literal["append", "reselect"] = "append"
    votes: Literal["running", "window"] = "running"
    shares: Shares = "head"

    name = "snapkv"

    def cut(self, record: Record, moment: Moment) -> list[Cut]:
        if self.decode == "append":
            count = moment.budget
            full = [moment.stage == "prompt" and len(held) > count for held in record.held[moment.layer]]
        else:
            running = self.votes == "running"
            count = moment.budget - (1 if running else max(1, min(128, moment.budget // 8)))
            if running and moment.stage == "prompt":
                self.remember(record, moment)
            full = [len(held) + 1 > moment.budget for held in record.held[moment.layer]]
        return [
            self.select(record, moment, kv_head, count) if full[kv_head] else Cut(list(held))
            for kv_head, held in enumerate(record.held[moment.layer])
        ]

    def select(self, record: Record, moment: Moment, kv_head: int, count: int) -> Cut:
        held = record.held[moment.layer][kv_head]
        if self.window >= count:
            return Cut(held[len(held) - count :])
        first_of_window = moment.next_query - self.window
        prefix = [p for p in held if p < first_of_window]
        recent = [p for p in held if p >= first_of_window]
        if self.decode == "reselect" and self.votes == "running" and moment.stage != "prompt":
            sharers = record.sharers(self.shares, moment.layer, kv_head)
            scores = {p: sum(self.running_votes(record, moment, *sharer, p) for sharer in sharers) for p in prefix}
            chosen = choose(scores, count - len(recent))
            return Cut(sorted(chosen.kept + recent), chosen.gap)
        total = [0.0] * len(prefix)
        for layer, sharer in record.sharers(self.shares, moment.layer, kv_head):
            votes = torch.stack(
                [self.window_votes(record, moment, layer, head, held) for head in record.heads_of(sharer)]
            )
            by_prefix_key = reduce_group(votes, self.group)[: len(prefix)].tolist()
            total = [one + other for one, other in zip(total, by_prefix_key, strict=True)]
        chosen = choose(dict(zip(prefix, self.smooth(total), strict=True)), count - len(recent))
        return Cut(sorted(chosen.kept + recent), chosen.gap)

    def remember(self, record: Record, moment: Moment) -> None:
        """Note what the window gives each entry of this layer at the end of a part of the prompt."""
        for kv_head, held in enumerate(record.held[moment.layer]):
            heads = record.heads_of(kv_head)
            votes = torch.stack([self.window_votes(record, moment, moment.layer, head, held) for head in heads])
            by_position = dict(zip(held, reduce_group(votes, self.group).tolist(), strict=True))
            record.noted[moment.layer, kv_head] = moment.next_query, by_position

    def running_votes(self, record: Record, moment: Moment, layer: int, kv_head: int, position: int) -> float:
        """What one KV head has given an entry: at the prompt's end, and by each query since."""
        end, at_end = record.noted[layer, kv_head]
        left, last = 1 - 1 / self.window, moment.next_query - 1
        total = at_end.get(position, 0.0) * left ** (last + 1 - end)
        for query in range(end, moment.next_query):
            given = record.probs[layer][record.heads_of(kv_head), query, position]
            total += reduce_group(given, self.group).item() * left ** (last - query)
        return total

    def window_votes(self, record: Record, moment: Moment, layer: int, head: int, held: list[int]) -> Tensor:
        """[held]: the probability that each held key receives from one head's window queries, summed."""
        total = torch.zeros(len(held), dtype=torch.float64)
        for query in range(max(0, moment.next_query - self.window), moment.next_query):
            may_see = [p for p in held if p <= query]
            if may_see:
                total[: len(may_see)] += record.probs_over(layer, head, query, may_see)
        return total

    def smooth(self, values: list[float]) -> list[float]:
        """Pool with stride 1: beyond the ends -inf for max, zeros that count for avg."""
        reach = self.kernel // 2
        outside = -math.inf if self.pool == "max" else 0.0
        padded = [outside] * reach + values + [outside] * reach
        pooled = []
        for i in range(len(values)):
            around = padded[i : i + self.kernel]
            pooled.append(max(around) if self.pool == "max" else sum(around) / self.kernel)
        return pooled
