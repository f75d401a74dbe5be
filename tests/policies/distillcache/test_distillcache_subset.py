"""The law of a subset of fixed size: against enumeration, its gradient against finite differences, and its samplers."""

from __future__ import annotations

import itertools
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evictbench.policies.distillcache import subset
from evictbench.policies.distillcache.subset import (
    conditional_poisson,
    gumbel_top,
    inclusion,
    log_partition,
    log_probability,
)

pytestmark = pytest.mark.engine


def random_scores(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def subsets(length: int, size: int) -> Tensor:
    """All subsets of a size, `[count, length]` bool."""
    found = torch.zeros(math.comb(length, size), length, dtype=torch.bool)
    for number, members in enumerate(itertools.combinations(range(length), size)):
        found[number, list(members)] = True
    return found


def weights(scores: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """All subsets, and the sum of scores of each."""
    every = subsets(len(scores), size)
    return every, scores.expand(every.shape).masked_fill(~every, 0.0).sum(-1)


# The partition and the log-probability.


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12).flatmap(
        lambda length: st.tuples(
            st.lists(st.floats(-30, 30), min_size=length, max_size=length),
            st.integers(0, length),
        )
    )
)
def test_against_enumeration(case: tuple[list[float], int]) -> None:
    """The log-partition, every subset's log-probability, and the chances of every entry."""
    scores, size = torch.tensor(case[0], dtype=torch.float64), case[1]
    every, sums = weights(scores, size)
    expected = sums.logsumexp(0)
    assert log_partition(scores, size) == pytest.approx(float(expected), abs=1e-10)
    found = log_probability(scores.expand(every.shape), every)
    torch.testing.assert_close(found, sums - expected, rtol=0, atol=1e-9)
    chances = (sums - expected).exp() @ every.double()
    torch.testing.assert_close(inclusion(scores, size), chances, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [0, 1, 3, 5, 6])
def test_gradient(size: int) -> None:
    """gradcheck, over a batch with padding."""
    scores = random_scores(2, 3, 6, spread=2.0)
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if size < 6:
        hidden[0, 1, 2] = hidden[1, 2, 5] = True
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: log_partition(s.masked_fill(hidden, -torch.inf), size), (scores,))


def test_gradient_of_log_probability() -> None:
    """What REINFORCE follows: what was chosen, less the chance of it."""
    scores = random_scores(4, 9).requires_grad_()
    chosen = gumbel_top(scores.detach(), 5, torch.Generator().manual_seed(1))
    log_probability(scores, chosen).sum().backward()
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, chosen.double() - inclusion(scores.detach(), 5))
    assert torch.autograd.gradcheck(lambda s: log_probability(s, chosen), (random_scores(4, 9).requires_grad_(),))


@pytest.mark.parametrize("size", [0, 1, 7, 150, 298, 299, 300])
def test_long_against_the_plain_programme(size: int) -> None:
    """Value and gradient of a longer one against the textbook recursion in logarithms, which autograd takes apart."""
    scores = random_scores(300, seed=3, spread=4.0).requires_grad_()
    state = [scores.new_zeros(())] + [scores.new_full((), -torch.inf)] * size
    table = torch.stack(state)
    for score in scores:
        moved = torch.cat([table.new_full((1,), -torch.inf), table[:-1] + score])
        both = torch.stack([table, moved])
        table = torch.where(both.isinf().all(0), -torch.inf, both.masked_fill(both.isinf(), -1e300).logsumexp(0))
    (expected,) = torch.autograd.grad(table[size], scores)
    again = scores.detach().clone().requires_grad_()
    found = log_partition(again, size)
    assert found.item() == pytest.approx(table[size].item(), rel=1e-12, abs=1e-9)
    found.backward()
    assert again.grad is not None
    torch.testing.assert_close(again.grad, expected.nan_to_num(), rtol=1e-8, atol=1e-10)


def test_each_row_its_own_size_and_padding() -> None:
    """A padded batch of several sizes, whichever side is counted, is its rows one by one."""
    for sizes in ([2, 5, 0, 3], [9, 5, 7, 3]):
        scores = random_scores(4, 10, seed=5, spread=3.0)
        scores[1, 5:] = scores[3, 3:] = -torch.inf
        found = log_partition(scores, torch.tensor(sizes))
        chances = inclusion(scores, torch.tensor(sizes))
        for row, size in enumerate(sizes):
            real = scores[row][scores[row] > -torch.inf]
            assert found[row].item() == pytest.approx(weights(real, size)[1].logsumexp(0).item(), abs=1e-10)
            torch.testing.assert_close(chances[row, : len(real)], inclusion(real, size), rtol=0, atol=1e-12)
            assert not chances[row, len(real) :].any()


def test_no_such_subset() -> None:
    """More than can be chosen: no probability, and no gradient but zero, beside rows that have both."""
    scores = random_scores(3, 4).requires_grad_()
    hidden = torch.tensor([[False] * 4, [True, True, False, False], [True] * 4])
    found = log_partition(scores.masked_fill(hidden, -torch.inf), 3)
    assert found.isinf().tolist() == [False, True, True]
    found[0].backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert not inclusion(scores.detach().masked_fill(hidden, -torch.inf), 3)[1:].any()
    assert log_partition(torch.full((3,), -torch.inf), 0).item() == 0


@pytest.mark.parametrize("size", [2, 3, 5])
def test_far_scores(size: int) -> None:
    """Scores whose exponentials no floating number holds, all of one value included."""
    scores = torch.tensor([900.0, -900.0, 3.0, 0.0, 1e4, -1e4], dtype=torch.float64)
    every, sums = weights(scores, size)
    assert log_partition(scores, size).item() == pytest.approx(sums.logsumexp(0).item(), rel=1e-12)
    chances = sums.softmax(0) @ every.double()
    torch.testing.assert_close(inclusion(scores, size), chances, rtol=0, atol=1e-10)
    level = torch.full((2000,), 700.0, dtype=torch.float64)
    expected = math.lgamma(2001) - math.lgamma(1001) - math.lgamma(1001) + 700.0 * 1000
    assert log_partition(level, 1000).item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(inclusion(level, 1000), torch.full_like(level, 0.5))


def test_dtype_and_shift() -> None:
    """Float32 in and out, float64 inside; a shift of all scores is that of the sum, and moves no chance."""
    scores = random_scores(2, 500, seed=9).float()
    found = log_partition(scores, 125)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), log_partition(scores.double(), 125), rtol=1e-6, atol=0)
    torch.testing.assert_close(inclusion(scores + 50, 125), inclusion(scores, 125), rtol=0, atol=1e-4)
    torch.testing.assert_close(inclusion(scores, 125).sum(-1), torch.full((2,), 125.0))


@pytest.mark.parametrize("size", [100, 300])
def test_memory(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the table that are held at once: forward two, backward two times √L, of the fewer's width."""
    held, most, widths = 0, 0, set()
    plain = subset._Counting._after

    def drop() -> None:
        nonlocal held
        held -= 1

    def counted(self: subset._Counting, state: Tensor, item: int) -> Tensor:
        nonlocal held, most
        row: Tensor = plain(self, state, item)
        held += 1
        most = max(most, held)
        widths.add(row.shape[1])
        weakref.finalize(row, drop)
        return row

    monkeypatch.setattr(subset._Counting, "_after", counted)
    scores = random_scores(400).requires_grad_()
    value = log_partition(scores, size)
    assert 0 < most <= 2
    value.backward()
    assert most <= 2 * math.isqrt(400) + 2
    assert widths == {101}
    assert held == 0


# The samplers.


def frequencies(draws: Tensor, every: Tensor) -> Tensor:
    """How often each subset was drawn."""
    digits = 2 ** torch.arange(every.shape[1])
    code = (draws * digits).sum(-1)
    return torch.stack([(code == member).sum() for member in (every * digits).sum(-1)]).double()


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """The chance of a fit at least this bad."""
    from scipy.stats import chisquare

    return float(chisquare(counts.numpy(), (probabilities * counts.sum()).numpy()).pvalue)


def plackett_luce(scores: Tensor, every: Tensor) -> Tensor:
    """A subset's chance as draws without replacement: the sum over the orders."""
    found = []
    for members in every:
        total = 0.0
        for order in itertools.permutations(members.nonzero()[:, 0].tolist()):
            left, chance = scores.exp().clone(), 1.0
            for one in order:
                chance *= float(left[one] / left.sum())
                left[one] = 0
            total += chance
        found.append(total)
    return torch.tensor(found, dtype=torch.float64)


DRAWS = 40_000
SCORES = torch.tensor([1.5, 0.0, -0.5, 0.8, -1.5, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_conditional_poisson_follows_the_law(size: int) -> None:
    every, sums = weights(SCORES, size)
    draws = conditional_poisson(SCORES.expand(DRAWS, -1), size, torch.Generator().manual_seed(size))
    assert (draws.sum(-1) == size).all()
    assert chi_square(frequencies(draws, every), sums.softmax(0)) > 1e-3


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gumbel_top_does_not(size: int) -> None:
    """It is Plackett-Luce: the same draws that fit that law cannot be the other's."""
    every, sums = weights(SCORES, size)
    draws = gumbel_top(SCORES.expand(DRAWS, -1), size, torch.Generator().manual_seed(size))
    assert (draws.sum(-1) == size).all()
    counts = frequencies(draws, every)
    assert chi_square(counts, plackett_luce(SCORES, every)) > 1e-3
    assert chi_square(counts, sums.softmax(0)) < 1e-9


def test_one_of_them_is_the_same_law() -> None:
    """Of one entry, and only of one, both laws are the softmax."""
    every, sums = weights(SCORES, 1)
    draws = gumbel_top(SCORES.expand(DRAWS, -1), 1, torch.Generator().manual_seed(0))
    assert chi_square(frequencies(draws, every), sums.softmax(0)) > 1e-3


def test_samplers_of_long_rows() -> None:
    """Sizes, padding and the ends; and how often each entry comes, to within five standard deviations."""
    scores = random_scores(120, seed=2, spread=2.0)
    scores[[4, 50]] = -torch.inf
    for size in (0, 1, 30, 90, 117, 118):
        chances = inclusion(scores, size)
        draws = conditional_poisson(scores.expand(4000, -1), size, torch.Generator().manual_seed(size))
        assert (draws.sum(-1) == size).all()
        error = (draws.double().mean(0) - chances).abs()
        assert (error <= 5 * (chances * (1 - chances) / 4000).sqrt() + 1e-3).all()
        top = gumbel_top(scores.expand(10, -1), size, torch.Generator().manual_seed(size))
        assert (top.sum(-1) == size).all()
        assert not (top | draws[:10])[:, [4, 50]].any()


def test_same_seed_same_draws() -> None:
    scores = random_scores(3, 40)
    for sample in (gumbel_top, conditional_poisson):
        first, again, other = (sample(scores, 10, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_too_many_cannot_be_drawn() -> None:
    scores = torch.tensor([[0.0, 1.0, -torch.inf]])
    for sample in (gumbel_top, conditional_poisson):
        with pytest.raises(ValueError, match="no subset of 3 entries"):
            sample(scores, 3, torch.Generator())
