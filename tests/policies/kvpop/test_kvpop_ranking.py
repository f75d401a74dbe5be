"""Age, static priorities, and what the pool holds at every query."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from twin_comparison import examples

from evictbench.policies.kvpop import ranking
from evictbench.policy import NEVER
from evictbench.policy.expiry import static_expiry
from twin import kvpop as twin

quick = examples(100)
SLOWEST, FASTEST = math.log(0.999999), math.log(0.999)

lengths = st.integers(1, 40)
pools = st.tuples(st.integers(0, 4), st.integers(1, 8), st.integers(1, 10))
"""sinks, window and pool."""


@quick
@given(raw=st.floats(-1e30, 1e30), small=st.floats(-20, 20))
def test_gamma_stays_in_its_interval(raw: float, small: float) -> None:
    bounded = ranking.bounded_log_gamma(torch.tensor([raw, small, 1e30, -1e30, 0.0]))
    assert bounded.dtype == torch.float32
    # To the last bit of a float32.
    assert (bounded.double() >= FASTEST * (1 + 2**-23)).all()
    assert (bounded.double() <= SLOWEST * (1 - 2**-23)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gamma_is_float32_whatever_the_parameter(dtype: torch.dtype) -> None:
    bounded = ranking.bounded_log_gamma(torch.linspace(-60, 60, 31).to(dtype))
    assert bounded.dtype == torch.float32
    assert (bounded.double() >= FASTEST * (1 + 2**-23)).all()
    assert (bounded.double() <= SLOWEST * (1 - 2**-23)).all()


def test_both_ends_of_the_interval_are_within_reach() -> None:
    bounded = ranking.bounded_log_gamma(torch.linspace(-30, 30, 601)).double()
    assert bounded.max() > SLOWEST * 1.5
    assert bounded.min() < FASTEST * 0.95
    steps = bounded.diff()
    assert (steps >= 0).all() or (steps <= 0).all()


def test_gamma_can_be_learned() -> None:
    raw = torch.zeros(3, requires_grad=True)
    ranking.bounded_log_gamma(raw).sum().backward()
    assert raw.grad is not None
    assert (raw.grad != 0).all()


@quick
@given(
    scores=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=40),
    log_gamma=st.floats(FASTEST, SLOWEST),
)
def test_static_priority_equals_the_aged_ranking_at_every_query(scores: list[float], log_gamma: float) -> None:
    rate = torch.tensor([log_gamma]).float()
    priority = ranking.priority(torch.tensor([scores]), rate)[0]
    assert priority.dtype == torch.float32
    for q in range(len(scores)):
        by_age = [twin.aged(scores, rate.item(), q, t) for t in range(q + 1)]
        for earlier in range(q + 1):
            for later in range(earlier + 1, q + 1):
                # What float32 can tell apart at numbers of this size.
                if abs(by_age[earlier] - by_age[later]) > 2e-6:
                    assert (priority[earlier] > priority[later]) == (by_age[earlier] > by_age[later])


def test_positions_may_be_given() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, rate = torch.randn(2, 3, 30, generator=generator), ranking.bounded_log_gamma(torch.randn(3))
    whole = ranking.priority(scores, rate)
    positions = torch.arange(30).expand(2, 3, 30)
    torch.testing.assert_close(ranking.priority(scores, rate, positions), whole, atol=0, rtol=0)
    shuffled = torch.randperm(30, generator=generator)
    part = ranking.priority(scores[..., shuffled], rate, positions[..., shuffled])
    torch.testing.assert_close(part, whole[..., shuffled], atol=0, rtol=0)


@quick
@given(
    heads=st.lists(st.lists(st.integers(0, 5), min_size=40, max_size=40), min_size=1, max_size=3),
    length=lengths,
    sizes=pools,
)
def test_boundaries_equal_the_brute_force_at_every_query(
    heads: list[list[int]], length: int, sizes: tuple[int, int, int]
) -> None:
    """Scores of six values: ties everywhere."""
    sinks, window, pool = sizes
    priority = torch.tensor(heads, dtype=torch.float32)[:, :length]
    found = ranking.boundaries(priority, sinks=sinks, window=window, pool=pool)
    assert found.boundary.shape == found.keeps_new.shape == priority.shape
    assert found.boundary.dtype == torch.int64
    for head, scores in enumerate(priority.tolist()):
        for q in range(length):
            best = twin.best_of_pool(scores, 0.0, q, sinks, window, pool)
            full = len(twin.eligible(q, sinks, window)) > pool
            assert found.boundary[head, q] == (best[-1] if full else -1), (head, q)
            if sinks <= q - window:
                assert found.keeps_new[head, q] == (q - window in best), (head, q)


@quick
@given(scores=st.lists(st.integers(0, 5), min_size=1, max_size=40), sizes=pools)
def test_a_dropped_token_never_returns(scores: list[int], sizes: tuple[int, int, int]) -> None:
    """The best of all that have ever been in the pool are what the one-in, one-out recursion holds."""
    sinks, window, pool = sizes
    priorities = [float(score) for score in scores]
    by_recursion = twin.pools_by_recursion(priorities, sinks, window, pool)
    for q, held in enumerate(by_recursion):
        assert held == sorted(twin.best_of_pool(priorities, 0.0, q, sinks, window, pool))
    found = ranking.boundaries(torch.tensor([priorities]), sinks=sinks, window=window, pool=pool)
    dropped: set[int] = set()
    for q, held in enumerate(by_recursion):
        boundary = int(found.boundary[0, q])
        if boundary >= 0:
            above = [
                t for t in twin.eligible(q, sinks, window) if (priorities[t], -t) >= (priorities[boundary], -boundary)
            ]
            assert above == held
        dropped |= set(twin.eligible(q, sinks, window)) - set(held)
        assert not dropped & set(held)


@quick
@given(scores=st.lists(st.integers(0, 5), min_size=1, max_size=40), sizes=pools)
def test_expiry_of_a_whole_text_equals_the_recursion(scores: list[int], sizes: tuple[int, int, int]) -> None:
    sinks, window, pool = sizes
    length = len(scores)
    positions = torch.arange(length)[None]
    expiry = static_expiry(
        torch.tensor(scores, dtype=torch.float32)[None, None],
        positions[None].int(),
        positions.int(),
        torch.full((1, length + 1), sinks + window + pool),
        sinks=sinks,
        recent=window,
        steady=True,
    )[0, 0]
    held = twin.pools_by_recursion([float(score) for score in scores], sinks, window, pool)
    for t, expires in enumerate(expiry.tolist()):
        lost = [q for q in range(length) if sinks <= t <= q - window and t not in held[q]]
        assert expires == (lost[0] if lost else expires if expires >= length else NEVER), t
