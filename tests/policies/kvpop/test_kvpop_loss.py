"""The loss against explicit loops, what it leaves out, and where its gradients go."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus
from twin_comparison import examples

from evictbench.policies.kvpop import loss, ranking, scorers
from twin import kvpop as twin

quick = examples(100)


def by_loops(teacher: Tensor, student: Tensor, sinks: int, window: int, pool: int, temperature: float) -> Tensor:
    """The mean over every decision of every head, weights from the words of the loss's docstring."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for of_teacher, of_student in zip(teacher.double(), student.double(), strict=True):
        found = twin.decisions(of_teacher, of_student, sinks, window, pool)
        discount = [abs(d.margin.item()) / (abs(d.margin.item()) + loss.TIE) for d in found]
        alike = {label: sum(decision.keeps == label for decision in found) for label in (True, False)}
        omega = [weight / alike[decision.keeps] for decision, weight in zip(found, discount, strict=True)]
        for decision, weight in zip(found, omega, strict=True):
            share = weight * len(found) / sum(omega) if weight else 0.0
            sign = 1 if decision.keeps else -1
            total = total + share * softplus(-sign * decision.delta / temperature)
        count += len(found)
    return total / max(1, count)


@quick
@given(
    seed=st.integers(0, 10_000),
    heads=st.integers(1, 3),
    length=st.integers(1, 40),
    sizes=st.tuples(st.integers(0, 4), st.integers(1, 8), st.integers(1, 10)),
    temperature=st.sampled_from([1.0, 0.5, 2.0]),
    ties=st.booleans(),
)
def test_it_equals_the_loops(
    seed: int, heads: int, length: int, sizes: tuple[int, int, int], temperature: float, ties: bool
) -> None:
    sinks, window, pool = sizes
    generator = torch.Generator().manual_seed(seed)
    teacher = 2 * torch.randn(heads, length, generator=generator)
    teacher = teacher.round() if ties else teacher
    student = torch.randn(heads, length, generator=generator)
    found = loss.ranking_loss(teacher, student, sinks=sinks, window=window, pool=pool, temperature=temperature)
    assert found.shape == ()
    torch.testing.assert_close(
        found.double(), by_loops(teacher, student, sinks, window, pool, temperature), atol=1e-5, rtol=1e-4
    )


def test_leading_dimensions_are_free() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, 2, 3, 30, generator=generator)
    sizes = {"sinks": 1, "window": 3, "pool": 5}
    flat = loss.ranking_loss(teacher.view(6, 30), student.view(6, 30), **sizes)
    torch.testing.assert_close(loss.ranking_loss(teacher, student, **sizes), flat)


@pytest.mark.parametrize("length", [1, 5, 12])
def test_nothing_to_decide_while_the_pool_has_room(length: int) -> None:
    sinks, window, pool = 2, 3, 8
    assert len(twin.eligible(length - 1, sinks, window)) <= pool
    student = torch.randn(2, length, requires_grad=True)
    found = loss.ranking_loss(torch.randn(2, length), student, sinks=sinks, window=window, pool=pool)
    assert found.item() == 0
    found.backward()
    assert student.grad is not None
    assert not student.grad.any()


def test_no_term_where_the_newcomer_is_the_boundary() -> None:
    """Of tokens that grow better each is kept and, alone in the pool, is the boundary itself."""
    growing = torch.arange(20.0)[None]
    student = torch.randn(1, 20, requires_grad=True)
    found = loss.ranking_loss(growing, student, sinks=0, window=2, pool=1)
    assert found.item() == 0
    found.backward()
    assert student.grad is not None
    assert not student.grad.any()
    assert not twin.decisions(growing[0], student[0], 0, 2, 1)
    assert loss.ranking_loss(-growing, student, sinks=0, window=2, pool=1).item() > 0


def test_the_right_decisions_cost_less_and_less() -> None:
    teacher = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    sizes = {"sinks": 2, "window": 4, "pool": 6}
    right, none, wrong = (loss.ranking_loss(teacher, factor * teacher, **sizes).item() for factor in (50.0, 0.0, -50.0))
    assert right < 0.05
    assert none == pytest.approx(math.log(2), rel=1e-5)
    assert wrong > 1


def test_near_ties_count_less() -> None:
    """Pool of one, boundary 0.0: newcomers far under it and just under it, all of one label."""
    sizes = {"sinks": 0, "window": 1, "pool": 1}
    teacher = torch.tensor([[0.0, -4.0, -0.01, -4.0]])
    student = torch.zeros(1, 4, requires_grad=True)
    loss.ranking_loss(teacher, student, **sizes).backward()
    assert student.grad is not None
    far, near = student.grad[0, 1].item(), student.grad[0, 2].item()
    assert far > 0
    assert near / far == pytest.approx((0.01 / 0.51) / (4 / 4.5), rel=1e-3)


def test_both_labels_weigh_the_same() -> None:
    """One newcomer kept and many dropped: a student that knows nothing is pulled as hard by the one as by the many."""
    # Pool of two; 0 and 1 are in, 2 .. 7 are dropped, 8 is kept over 1 and is not the boundary.
    teacher = torch.tensor([[5.0, 3.0, *[-1.0] * 6, 9.0, -1.0]])
    found = twin.decisions(teacher[0], teacher[0], 0, 1, 2)
    assert [d.keeps for d in found] == [False] * 6 + [True]
    student = torch.zeros(1, 10, requires_grad=True)
    loss.ranking_loss(teacher, student, sinks=0, window=1, pool=2).backward()
    assert student.grad is not None
    kept, dropped = student.grad[0, 8], student.grad[0, 2:8].sum()
    assert kept.item() == pytest.approx(-dropped.item(), rel=1e-5)
    assert kept.item() == pytest.approx(-0.25, rel=1e-5)


@pytest.mark.parametrize("kind", [scorers.MLPScorer, scorers.MLSTMScorer])
def test_gradients_reach_scorer_and_decay_and_nothing_else(kind: type[scorers.MLPScorer]) -> None:
    torch.manual_seed(0)
    scorer = kind(2, 8, 6)
    if kind is scorers.MLSTMScorer:
        torch.nn.init.normal_(scorer.gates, std=0.3)  # type: ignore[arg-type]
    raw = torch.zeros(2, requires_grad=True)
    keys, values, label = (torch.randn(1, 2, 40, *tail).requires_grad_() for tail in ((8,), (8,), ()))
    rate = ranking.bounded_log_gamma(raw)
    student = ranking.priority(scorer(keys, values, 3), rate)
    teacher = ranking.priority(label, rate)
    loss.ranking_loss(teacher, student, sinks=1, window=3, pool=8).backward()
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None, name
        assert name == "b2" or parameter.grad.any(), name  # a bias common to all tokens ranks nothing
    assert raw.grad is not None
    assert raw.grad.all()
    assert keys.grad is None
    assert values.grad is None
    assert label.grad is None
    assert {name for name, _ in scorer.named_buffers()} == {"shift", "scale"}


def test_recall_is_the_share_of_the_teachers_pool() -> None:
    generator = torch.Generator().manual_seed(3)
    teacher, student = torch.randn(2, 4, 50, generator=generator)
    wanted = kept = 0
    for of_teacher, of_student in zip(teacher.tolist(), student.tolist(), strict=True):
        best = twin.best_of_pool(of_teacher, 0.0, 49, 2, 5, 9)
        wanted += len(best)
        kept += len(set(best) & set(twin.best_of_pool(of_student, 0.0, 49, 2, 5, 9)))
    assert loss.recall(teacher, student, sinks=2, window=5, pool=9) == pytest.approx(kept / wanted)
    assert loss.recall(teacher, teacher, sinks=2, window=5, pool=9) == 1
