"""One in, one out: expiry against the recursion as it is defined, whatever the chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from twin_comparison import assert_found, examples

from evictbench.policies.indexmem_pp import recursion
from evictbench.policy import NEVER
from twin.indexmem_pp import Pool
from twin.indexmem_pp import expiry as twin_expiry

Expiry = Callable[..., Tensor]

expiry: Expiry = recursion.expiry


def in_parts(
    scores: Tensor, rates: Tensor, parts: list[int], *, found: Expiry = expiry, capacity: int, **how: Any
) -> list[list[float]]:
    """The expiry `[heads][tokens]` of tokens that come in parts; what no later query sees is not shown again."""
    heads, length = scores.shape
    died = [[math.inf] * length for _ in range(heads)]
    held = torch.zeros((heads, 0), dtype=torch.int32)
    first = 0
    for part in [*parts, *[1] * length]:
        new = min(part, length - first)
        if new <= 0:
            break
        coming = torch.arange(first, first + new, dtype=torch.int32).expand(heads, -1)
        positions = torch.cat((held, coming), dim=1)
        at = positions.long()
        ends = found(
            scores.gather(1, at), rates.gather(1, at), positions, first=first, new=new, capacity=capacity, **how
        )
        assert ends.dtype == torch.int32
        assert ends.shape == positions.shape
        for head in range(heads):
            for position, end in zip(positions[head].tolist(), ends[head].tolist(), strict=True):
                if end <= first + new:
                    died[head][position] = end
                else:
                    assert end == NEVER
        first += new
        stays = ends > first
        held = torch.stack([row[stay] for row, stay in zip(positions, stays, strict=True)])
    return died


def by_definition(scores: Tensor, rates: Tensor, *, capacity: int, sinks: int, window: int) -> list[list[float]]:
    heads, length = scores.shape
    found = []
    for head in range(heads):
        pool = Pool(scores[head].tolist(), rates[head].tolist(), sinks, window, capacity)
        held = []
        for q in range(length + 1):
            pool.scores = [*scores[head].tolist(), 0.0]
            pool.turn(q)
            held.append(list(pool.held))
        found.append(twin_expiry(held, sinks, window)[:length])
    return found


def exact_scores(heads: int, length: int, highest: int, fall: int, seed: int) -> tuple[Tensor, Tensor]:
    """Whose sums with distances are exact in float32, with ties where the highest is low."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, highest, (heads, length), generator=generator) / 8
    return scores, -2048.0 * torch.randint(0, fall, (heads, length), generator=generator)


sizes = given(
    length=st.integers(1, 200),
    parts=st.lists(st.integers(1, 150), max_size=5),
    capacity=st.integers(0, 90),
    sinks=st.integers(0, 4),
    window=st.sampled_from([1, 2, 5, 40]),
    highest=st.sampled_from([1, 2, 40, 1000]),
    fall=st.sampled_from([1, 2, 4, 20]),
    seed=st.integers(0, 100),
)


@pytest.mark.engine
@examples(50)
@sizes
def test_expiry_equals_the_recursion(
    length: int, parts: list[int], capacity: int, sinks: int, window: int, highest: int, fall: int, seed: int
) -> None:
    scores, rates = exact_scores(2, length, highest, fall, seed)
    ours = in_parts(scores, rates, parts, capacity=capacity, sinks=sinks, window=window)
    assert ours == by_definition(scores, rates, capacity=capacity, sinks=sinks, window=window)


@pytest.mark.engine
def test_chunks_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn((3, 900), generator=generator)
    rates = -40 * torch.rand((3, 900), generator=generator)
    how = {"capacity": 100, "sinks": 4, "window": 32}
    whole = in_parts(scores, rates, [900], **how)  # type: ignore[arg-type]
    for parts in ([256] * 4, [1], [7, 600, 3], [63, 64, 65, 128]):
        assert in_parts(scores, rates, parts, **how) == whole  # type: ignore[arg-type]
    assert whole != in_parts(scores, torch.zeros_like(rates), [900], **how)  # type: ignore[arg-type]


@pytest.mark.engine
@examples(20)
@sizes
def test_the_middle_of_a_chunk_ranks_all_of_it(
    length: int, parts: list[int], capacity: int, sinks: int, window: int, highest: int, fall: int, seed: int
) -> None:
    scores, rates = exact_scores(2, length, highest, fall, seed)
    ours = in_parts(scores, rates, parts, capacity=capacity, sinks=sinks, window=window, how="middle")
    for head in range(2):
        pool = Pool([*scores[head].tolist(), 0.0], [*rates[head].tolist(), 0.0], sinks, window, capacity)
        died, first = [math.inf] * length, 0
        pool.turn(0)
        for part in [*parts, *[1] * length]:
            new = min(part, length - first)
            for q in range(first + 1, first + new + 1):
                for gone in pool.turn(q, ranked_at=first + new // 2):
                    died[gone] = q
            first += new
        assert ours[head] == died


def one_later(*tensors: Tensor, **how: Any) -> Tensor:
    ends = expiry(*tensors, **how)
    return torch.where(ends < how["first"] + how["new"], ends + 1, ends)


def no_decay(score: Tensor, rate: Tensor, positions: Tensor, **how: Any) -> Tensor:
    return expiry(score, torch.zeros_like(rate), positions, **how)


def first_query_decides(score: Tensor, rate: Tensor, positions: Tensor, **how: Any) -> Tensor:
    frozen = recursion.effective(score, rate, how["first"] - positions)
    return expiry(frozen, torch.zeros_like(rate), positions, **how)


def later_wins(score: Tensor, rate: Tensor, positions: Tensor, **how: Any) -> Tensor:
    return expiry(score + positions / 1024, rate, positions, **how)


def sink_competes(score: Tensor, rate: Tensor, positions: Tensor, **how: Any) -> Tensor:
    return expiry(score, rate, positions, **{**how, "sinks": max(0, how["sinks"] - 1)})


def one_entry_more(score: Tensor, rate: Tensor, positions: Tensor, **how: Any) -> Tensor:
    return expiry(score, rate, positions, **{**how, "capacity": how["capacity"] + 1})


def chunk_starts_anew(score: Tensor, rate: Tensor, positions: Tensor, **how: Any) -> Tensor:
    """What is held from before keeps the score that it had as the chunk began."""
    old = positions < how["first"]
    frozen = torch.where(old, recursion.effective(score, rate, how["first"] - positions), score)
    return expiry(frozen, torch.where(old, 0.0, rate), positions, **how)


@pytest.mark.parametrize(
    "wrong", [one_later, no_decay, first_query_decides, later_wins, sink_competes, one_entry_more, chunk_starts_anew]
)
def test_a_wrong_recursion_is_found(wrong: Expiry) -> None:
    def run(
        length: int, parts: list[int], capacity: int, sinks: int, window: int, highest: int, fall: int, seed: int
    ) -> None:
        scores, rates = exact_scores(2, length, highest, fall, seed)
        ours = in_parts(scores, rates, parts, found=wrong, capacity=capacity, sinks=sinks, window=window)
        assert ours == by_definition(scores, rates, capacity=capacity, sinks=sinks, window=window)

    assert_found(run, sizes, 30)
