"""Random small cases of IndexMem++, and its twin run on them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from twin.indexmem_pp_run import Rules, Run, Starts, Told
from twin.tiny import random_tokens, tiny_model

Scores = Literal["spread", "ties", "equal", "one_flat"]
LAYERS = 2


@dataclass(frozen=True)
class Case:
    """`context` tokens are read in parts of `chunk`, or whole where that is needed, and compressed; `question` tokens
    in one; the rest one by one."""

    rules: Rules
    kind: Literal["llama", "qwen3"]
    seed: int
    kv_heads: int
    groups: int
    length: int
    question: int
    chunk: int
    scores: Scores

    def model(self) -> Any:
        return tiny_model(self.kind, self.seed % 3, LAYERS, self.kv_heads, self.groups)

    @property
    def context(self) -> int:
        return self.rules.context

    @property
    def tokens(self) -> list[int]:
        return random_tokens(self.length, self.seed)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Where forward passes begin and end."""
        step = self.context if self.rules.divides_first else self.chunk
        borders = [*range(0, self.context, step), self.context, self.context + self.question]
        borders = sorted({*borders, *range(self.context + self.question, self.length), self.length})
        return list(itertools.pairwise(borders))

    def scores_and_rates(self) -> tuple[Tensor, Tensor]:
        """Scores and rates, `[layers, kv_heads, tokens]`; sums of them with whole distances are exact in float32."""
        generator = torch.Generator().manual_seed(self.seed)
        size = (LAYERS, self.kv_heads, self.length)
        highest = 2 if self.scores == "ties" else 64
        scores = torch.randint(0, highest, size, generator=generator) / 8
        falls = torch.randint(0, 4, size, generator=generator)
        if self.scores == "ties":
            falls = falls // 3
        if self.scores == "equal":
            scores, falls = torch.full_like(scores, 0.25), torch.ones_like(falls)
            falls[:] = 0
        if self.scores == "one_flat":
            scores[:, 0], falls[:, 0] = 1.0, 0
        return scores, -2048.0 * falls


def first_ones(layer: int, kv_head: int, evicted: Sequence[int]) -> Sequence[int]:
    """Where clusters start: at the first entries."""
    return evicted


def told(case: Case, run: type[Run] = Run, starts: Starts = first_ones) -> Told:
    """What the twin says of a case."""
    scores, rates = case.scores_and_rates()

    def score_and_rate(layer: int, kv_head: int, position: int, received: Tensor) -> tuple[float, float]:
        return float(scores[layer, kv_head, position]), float(rates[layer, kv_head, position])

    twin = run(case.model(), score_and_rate, case.rules, starts, case.length)
    for begin, end in case.parts:
        twin.read(case.tokens[begin:end])
    return twin.told()


@st.composite
def cases(
    draw: st.DrawFn,
    prefill: tuple[Any, ...] = ("native", "dense", "bounded"),
    prompt: tuple[Any, ...] = ("divided", "divided", "equal_share"),
    centroids: tuple[int, ...] = (0, 1, 3),
    question: int = 8,
    scores: tuple[Any, ...] = ("spread", "ties", "equal", "one_flat"),
    approximate: bool = True,
) -> Case:
    """Lengths up to 60, one-token prompts, budgets from the least to more than the text."""
    length = draw(st.one_of(st.integers(30, 60), st.integers(1, 60)))
    context = draw(st.integers(1, length))
    sinks, window = draw(st.sampled_from([0, 1, 2, 4])), draw(st.sampled_from([1, 2, 3, 6]))
    slots = draw(st.sampled_from(centroids))
    least = sinks + window + 1
    budgets = st.one_of(
        st.integers(least, least + 8), st.integers(least, length + least), st.sampled_from([0.5, 0.75, 0.9])
    )
    kv_heads, groups = draw(st.sampled_from([(2, 2), (2, 3), (4, 1), (1, 2)]))
    rules = Rules(
        context=context,
        budget=draw(budgets),
        sinks=sinks,
        window=window,
        centroids=slots,
        budgets=draw(st.sampled_from(["mass", "uniform"])),
        floor=draw(st.sampled_from([None, 0, 1, 2])),
        prefill=draw(st.sampled_from(prefill)),
        prompt=draw(st.sampled_from(prompt)),
        deadlines=draw(st.sampled_from([None, None, "exact", "middle"])) if approximate else None,
    )
    return Case(
        rules=rules,
        kind=draw(st.sampled_from(["llama", "qwen3"])),
        seed=draw(st.integers(0, 50)),
        kv_heads=kv_heads,
        groups=groups,
        length=length,
        question=min(draw(st.integers(0, question)), length - context),
        chunk=draw(st.integers(1, 40)),
        scores=draw(st.sampled_from(scores)),
    )
