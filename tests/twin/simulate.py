"""One sequence under one rule: the prompt in chunks, then token by token, with explicit visibility."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twin.model import DenseModel
from twin.rules import Moment, Rule, Shares, Stage

Prefill = Literal["native", "dense", "bounded"]
Head = tuple[int, int]  # (layer, kv_head)


@dataclass(frozen=True)
class Budget:
    """Entries per KV head that a query may see, itself included: int, share (float) or no limit (None)."""

    amount: int | float | None
    prompt: int  # length of the prompt, or of the context where the question is unseen
    charged: int = 0  # entries' worth of state kept beside the cache, which the budget pays for
    beside: int = 0  # entries' worth of state that travels with each entry

    def at(self, seen: int) -> int | None:
        """The budget of the query that is the `seen`-th token of the text."""
        if self.amount is None:
            return None
        if isinstance(self.amount, int):
            return (self.amount - self.charged) // (1 + self.beside)
        amount = max(32, math.floor(self.amount * max(self.prompt, seen)))
        return (amount - self.charged) // (1 + self.beside)


class Record:
    """Everything that has happened, per layer; nothing is ever deleted but positions from `held`.

    raw_queries, raw_keys: before RoPE; queries, keys: after it, at the true positions.
    All of these and values: [tokens, heads, head_dim].
    probs: [heads, query, key], zero where a query did not look. held: per KV head, ascending positions.
    noted: per KV head, a number by position that a rule has noted, and the position of the query that came next.
    """

    def __init__(self, dense: DenseModel, length: int) -> None:
        def blank(*shape: int) -> list[Tensor]:
            return [torch.zeros(*shape, dtype=torch.float64) for _ in range(dense.layers)]

        self.dense = dense
        self.raw_queries = blank(length, dense.heads, dense.head_dim)
        self.queries = blank(length, dense.heads, dense.head_dim)
        self.raw_keys = blank(length, dense.kv_heads, dense.head_dim)
        self.keys = blank(length, dense.kv_heads, dense.head_dim)
        self.values = blank(length, dense.kv_heads, dense.head_dim)
        self.probs = blank(dense.heads, length, length)
        self.held: list[list[list[int]]] = [[[] for _ in range(dense.kv_heads)] for _ in range(dense.layers)]
        self.noted: dict[Head, tuple[int, dict[int, float]]] = {}

    def heads_of(self, kv_head: int) -> list[int]:
        """The query heads that share a KV head."""
        return [kv_head * self.dense.group + g for g in range(self.dense.group)]

    def sharers(self, shares: Shares, layer: int, kv_head: int) -> list[Head]:
        """Those that keep one set with this KV head of this layer, itself among them."""
        layers = range(self.dense.layers) if shares == "model" else [layer]
        kv_heads = [kv_head] if shares == "head" else range(self.dense.kv_heads)
        return [(each, head) for each in layers for head in kv_heads]

    def probs_over(self, layer: int, head: int, query: int, positions: list[int]) -> Tensor:
        """[positions]: the softmax of a past query over these keys, all at their true positions."""
        keys = self.keys[layer][positions, head // self.dense.group]
        return self.dense.softmax(layer, self.queries[layer][query, head], keys)

    def probs_in_cache(self, layer: int, head: int, query: int, positions: list[int]) -> Tensor:
        """The same with positions counted in the cache: keys at slots 0, 1, ..., the query at the last."""
        kv_head = head // self.dense.group
        slots = range(len(positions))
        keys = self.dense.rotate(self.raw_keys[layer][positions, kv_head][:, None], slots)[:, 0]
        turned = self.dense.rotate(self.raw_queries[layer][query, head][None, None], [slots[-1]])[0, 0]
        return self.dense.softmax(layer, turned, keys)


@dataclass
class Trace:
    """What a simulation did. Positions count from 0; a query is named by its position."""

    prompt: int
    tokens: list[int]  # prompt and generated
    logits: Tensor  # [tokens, vocab]: row p is what the model says after the token at position p
    seen: list[dict[Head, list[int]]]  # per query: the positions that it saw, itself included
    kept: dict[int, dict[Head, list[int]]]  # by tokens seen so far: what is held when the next query comes
    gaps: list[float] = field(default_factory=list)  # per cut: worst kept score minus best dropped score
    record: Record | None = None

    @property
    def generated(self) -> list[int]:
        """The new tokens, chosen or forced."""
        return self.tokens[self.prompt :]

    @property
    def closest(self) -> float:
        """The smallest gap above zero: how nearly another correct program could have kept something else."""
        return min((gap for gap in self.gaps if gap > 0), default=math.inf)

    def occupancy(self, query: int) -> dict[Head, int]:
        """How many entries each KV head's query saw, itself included."""
        return {head: len(positions) for head, positions in self.seen[query].items()}


def simulate(
    model: PreTrainedModel,
    policy_rule: Rule,
    prompt: Sequence[int],
    new_tokens: int | Sequence[int],
    budget: int | float | None,
    prefill: Prefill = "native",
    chunk: int = 16,
    border: int | None = None,
    charged: int = 0,
    beside: int = 0,
) -> Trace:
    """Read the prompt, then generate, evicting as the rule says.

    `new_tokens`: how many to choose greedily, or the tokens themselves. Every new token is read too, the last
    included, so `logits` has a row and `kept` an entry for each.
    `budget`: an int, a share as a float, or None.
    `border`: where the question begins, if it is unseen: prompt[:border] is the context.
    `charged`: entries that the budget loses to state beside the cache, and `beside` with each entry; the rule works
    with what is left.

    Raises ValueError for a budget that the rule cannot work with.
    """
    if not prompt:
        raise ValueError("the prompt is empty")
    if chunk < 1:
        raise ValueError(f"chunk {chunk} is not positive")
    if prefill not in ("native", "dense", "bounded"):
        raise ValueError(f"no prefill mode {prefill!r}")
    context = len(prompt) if border is None else border
    if not 1 <= context <= len(prompt):
        raise ValueError(f"the border {border} is not inside the prompt of {len(prompt)}")
    allowed = Budget(budget, context, charged, beside)
    least = allowed.at(1)
    if least is not None and least < policy_rule.least_budget:
        raise ValueError(f"{policy_rule.name} needs a budget of at least {policy_rule.least_budget}, not {least}")

    forced = None if isinstance(new_tokens, int) else list(new_tokens)
    steps = new_tokens if isinstance(new_tokens, int) else len(new_tokens)
    run = _Run(DenseModel(model), policy_rule, allowed, len(prompt) + steps)
    with torch.no_grad():
        cuts_each_chunk = prefill == "bounded"
        exact_prompt = policy_rule.token_at_a_time and prefill != "dense"
        for start in range(0, context, chunk):
            end = min(start + chunk, context)
            run.forward(
                list(prompt[start:end]),
                "prompt",
                each_token=exact_prompt,
                at_end=cuts_each_chunk or end == context,
            )
        if context < len(prompt):
            run.forward(list(prompt[context:]), "question", each_token=policy_rule.token_at_a_time, at_end=True)
        for step in range(steps):
            token = int(run.logits[-1].argmax()) if forced is None else forced[step]
            run.forward([token], "decode", each_token=policy_rule.token_at_a_time, at_end=True)
    return Trace(len(prompt), run.tokens, torch.stack(run.logits), run.seen, run.kept, run.gaps, run.record)


class _Run:
    """A sequence in progress."""

    def __init__(self, dense: DenseModel, rule: Rule, budget: Budget, length: int) -> None:
        self.dense = dense
        self.rule = rule
        self.budget = budget
        self.record = Record(dense, length)
        self.tokens: list[int] = []
        self.logits: list[Tensor] = []
        self.seen: list[dict[Head, list[int]]] = []
        self.kept: dict[int, dict[Head, list[int]]] = {}
        self.gaps: list[float] = []
        self.first = 0

    def forward(self, tokens: list[int], stage: Stage, each_token: bool, at_end: bool) -> None:
        """Layer by layer, query by query. Cut after each token, after the whole forward, or not at all."""
        first = len(self.tokens)
        positions = range(first, first + len(tokens))
        self.tokens += tokens
        for _ in positions:
            self.seen.append({})
        hidden = self.dense.embed(tokens)
        for layer in range(self.dense.layers):
            self.write(layer, hidden, positions)
            attended = torch.zeros(len(tokens), self.dense.heads, self.dense.head_dim, dtype=torch.float64)
            for query in positions:
                for kv_head in range(self.dense.kv_heads):
                    self.record.held[layer][kv_head].append(query)
                    self.seen[query][layer, kv_head] = list(self.record.held[layer][kv_head])
                for head in range(self.dense.heads):
                    attended[query - first, head] = self.attend(layer, head, query)
                if each_token or (at_end and query == positions[-1] and self.rule.shares != "model"):
                    self.evict(layer, query + 1, stage)
                self.note(layer, query + 1)
            hidden = self.dense.finish(layer, hidden, attended)
        if at_end and self.rule.shares == "model":
            for layer in range(self.dense.layers):
                self.evict(layer, positions.stop, stage)
                self.note(layer, positions.stop)
        if at_end:
            self.first = positions.stop
        self.logits += list(self.dense.logits(hidden))
        # Inside a forward that cuts at its end at most, nothing is decided yet: keep no entry for it.
        if not each_token:
            for query in positions[:-1]:
                del self.kept[query + 1]

    def write(self, layer: int, hidden: Tensor, positions: range) -> None:
        record = self.record
        queries, keys, values = self.dense.project(layer, hidden)
        here = slice(positions.start, positions.stop)
        record.raw_queries[layer][here] = queries
        record.queries[layer][here] = self.dense.rotate(queries, positions)
        record.raw_keys[layer][here] = keys
        record.keys[layer][here] = self.dense.rotate(keys, positions)
        record.values[layer][here] = values

    def attend(self, layer: int, head: int, query: int) -> Tensor:
        """[head_dim]: one head of one query over the positions that it sees."""
        kv_head = head // self.dense.group
        visible = self.seen[query][layer, kv_head]
        look = self.record.probs_in_cache if self.rule.reindexed else self.record.probs_over
        probs = look(layer, head, query, visible)
        self.record.probs[layer][head, query, visible] = probs
        return probs @ self.record.values[layer][visible, kv_head]

    def evict(self, layer: int, next_query: int, stage: Stage) -> None:
        budget = self.budget.at(next_query + 1)
        if budget is None:
            return
        share = self.budget.amount if isinstance(self.budget.amount, float) else None
        moment = Moment(layer, next_query, budget, stage, self.first, share)
        cuts = self.rule.cut(self.record, moment)
        for kv_head, cut in enumerate(cuts):
            if not set(cut.kept) <= set(self.record.held[layer][kv_head]):
                raise AssertionError("a rule kept a position that was not held")
            if cut.gap < math.inf:
                self.gaps.append(cut.gap)
            self.record.held[layer][kv_head] = list(cut.kept)

    def note(self, layer: int, seen: int) -> None:
        for kv_head in range(self.dense.kv_heads):
            self.kept.setdefault(seen, {})[layer, kv_head] = list(self.record.held[layer][kv_head])
