"""The memory: chunked form, recurrent step and explicit sums are one; extreme gates; scorers against the twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from largest_tensor import LargestTensor
from torch import Tensor
from twin_comparison import examples

from evictbench.policies.kvpop import mlstm, scorers
from twin import kvpop as twin

quick = examples(60)


def by_sums(key: Tensor, value: Tensor, gate: Tensor, log_forget: Tensor, query: Tensor) -> Tensor:
    """[heads, S, d] float64: each token's query, read after that token."""
    answers = torch.zeros(query.shape, dtype=torch.float64)
    key, value, gate, log_forget, query = (x.double() for x in (key, value, gate, log_forget, query))
    for head in range(query.shape[0]):
        for t in range(query.shape[1]):
            seen = slice(0, t + 1)
            answers[head, t] = twin.memory_read(
                key[head, seen], value[head, seen], gate[head, seen], log_forget[head, seen], query[head, t]
            )
    return answers


def by_steps(
    state: mlstm.State, key: Tensor, value: Tensor, gate: Tensor, log_forget: Tensor, query: Tensor
) -> tuple[Tensor, mlstm.State]:
    answers = []
    for t in range(query.shape[-2]):
        state = mlstm.step(state, key[..., t, :], value[..., t, :], gate[..., t], log_forget[..., t])
        answers.append(mlstm.read(state, query[..., t, :]))
    return torch.stack(answers, dim=-2), state


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), wanted.double(), atol=1e-4, rtol=1e-4)


def plain(state: mlstm.State) -> tuple[Tensor, Tensor]:
    """Memory and normaliser under a common stabiliser, which the two forms need not share."""
    scale = state.stabiliser.exp()
    return state.memory * scale[..., None, None], state.normaliser * scale[..., None]


@quick
@given(
    seed=st.integers(0, 10_000),
    heads=st.integers(1, 3),
    d=st.sampled_from([1, 4, 16]),
    length=st.integers(1, 50),
    chunk=st.integers(1, 60),
    border=st.integers(0, 50),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
)
def test_chunks_steps_and_sums_are_one(
    seed: int, heads: int, d: int, length: int, chunk: int, border: int, spread: float
) -> None:
    """border: where one call ends and the next continues from its state."""
    generator = torch.Generator().manual_seed(seed)
    key, value, query = torch.randn(3, heads, length, d, generator=generator)
    gate = spread * torch.randn(heads, length, generator=generator)
    log_forget = torch.nn.functional.logsigmoid(2 + spread * torch.randn(heads, length, generator=generator))
    empty = mlstm.empty_state((heads,), d, key.device, key.dtype)
    first, second = slice(0, border), slice(border, None)
    parts, state = [], empty
    for part in (first, second):
        answer, state = mlstm.chunked(
            state, key[:, part], value[:, part], gate[:, part], log_forget[:, part], query[:, part], chunk
        )
        parts.append(answer)
    answers = torch.cat(parts, dim=1)
    stepped, last = by_steps(empty, key, value, gate, log_forget, query)
    sums = by_sums(key, value, gate, log_forget, query)
    close(stepped, sums)
    close(answers, sums)
    for ours, theirs in zip(plain(state), plain(last), strict=True):
        largest = theirs.abs().max().clamp(min=1)  # an entry may be a small difference of large terms
        close(ours / largest, theirs / largest)


@quick
@given(
    gates=st.lists(
        st.tuples(st.sampled_from([-50.0, 0.0, 50.0]), st.sampled_from([-50.0, 0.0, 4.0, 50.0])),
        min_size=1,
        max_size=70,
    ),
    chunk=st.integers(1, 70),
    seed=st.integers(0, 100),
)
def test_extreme_gates(gates: list[tuple[float, float]], chunk: int, seed: int) -> None:
    """Pre-activations of +-50 in any order: finite, and still one."""
    generator = torch.Generator().manual_seed(seed)
    key, value, query = torch.randn(3, 1, len(gates), 4, generator=generator)
    gate = torch.tensor([[opened for opened, _ in gates]])
    log_forget = torch.nn.functional.logsigmoid(torch.tensor([[kept for _, kept in gates]]))
    empty = mlstm.empty_state((1,), 4, key.device, key.dtype)
    answers, state = mlstm.chunked(empty, key, value, gate, log_forget, query, chunk)
    stepped, last = by_steps(empty, key, value, gate, log_forget, query)
    for tensor in (*state, *last):
        assert tensor.isfinite().all()
    sums = by_sums(key, value, gate, log_forget, query)
    close(stepped, sums)
    close(answers, sums)


@pytest.mark.parametrize("resets", [1, 5, 10, 30])
def test_what_was_forgotten_costs_no_precision(resets: int) -> None:
    """All forgotten several times and then remembered: sums over the whole chunk lose the small among the large."""
    torch.manual_seed(0)
    length = resets + 30
    key, value, query = torch.randn(3, 2, length, 4)
    gate = torch.zeros(2, length)
    forget = torch.cat([torch.full((2, resets), -50.0), torch.full((2, 30), 4.0)], dim=1)
    log_forget = torch.nn.functional.logsigmoid(forget)
    empty = mlstm.empty_state((2,), 4, key.device, key.dtype)
    answers, _ = mlstm.chunked(empty, key, value, gate, log_forget, query)
    close(answers, by_sums(key, value, gate, log_forget, query))


@pytest.mark.parametrize("level", [-50.0, 50.0])
@pytest.mark.parametrize("length", [64, 200])
def test_gradients_through_extreme_gates_are_finite(level: float, length: int) -> None:
    torch.manual_seed(0)
    key, value, query = torch.randn(3, 2, length, 8)
    gate = torch.full((2, length), level, requires_grad=True)
    forget = torch.full((2, length), -level, requires_grad=True)
    empty = mlstm.empty_state((2,), 8, key.device, key.dtype)
    answers, _ = mlstm.chunked(empty, key, value, gate, torch.nn.functional.logsigmoid(forget), query)
    answers.square().sum().backward()
    for parameter in (gate, forget):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_an_empty_memory_answers_nothing() -> None:
    empty = mlstm.empty_state((2, 3), 5, torch.device("cpu"), torch.float32)
    answer = mlstm.read(empty, torch.randn(2, 3, 5))
    assert torch.equal(answer, torch.zeros(2, 3, 5))
    nothing = torch.randn(2, 3, 0, 5)
    answers, state = mlstm.chunked(empty, nothing, nothing, nothing[..., 0], nothing[..., 0], nothing)
    assert answers.shape == (2, 3, 0, 5)
    for before, after in zip(empty, state, strict=True):
        assert torch.equal(before, after)


def test_what_is_not_written_changes_nothing() -> None:
    """Padding: an input gate of -inf and a forget gate of one, before anything is written and after."""
    torch.manual_seed(0)
    key, value, query = torch.randn(3, 1, 6, 4)
    gate, log_forget = torch.randn(1, 6), -torch.rand(1, 6)
    empty = mlstm.empty_state((1,), 4, key.device, key.dtype)
    alone, state = mlstm.chunked(empty, key, value, gate, log_forget, query)

    def with_gaps(tensor: Tensor, filled: float) -> Tensor:
        gap = torch.full_like(tensor[:, :1], filled)
        return torch.cat([gap, gap, tensor[:, :3], gap, tensor[:, 3:], gap], dim=1)

    padded = [with_gaps(x, 7.0) for x in (key, value)]
    opened, kept, asked = with_gaps(gate, -torch.inf), with_gaps(log_forget, 0.0), with_gaps(query, 1.0)
    real = torch.tensor([2, 3, 4, 6, 7, 8])
    for chunk in (1, 2, 64):
        answers, after = mlstm.chunked(empty, *padded, opened, kept, asked, chunk)
        assert answers.isfinite().all()
        close(answers[:, real], alone)
        for ours, theirs in zip(plain(after), plain(state), strict=True):
            close(ours, theirs)
    stepped, _ = by_steps(empty, *padded, opened, kept, asked)
    assert stepped.isfinite().all()
    close(stepped[:, real], alone)


def test_no_tensor_is_the_text_squared() -> None:
    """The state is handed from chunk to chunk."""
    torch.manual_seed(0)
    key, value, query = torch.randn(3, 1, 1024, 4)
    gate, log_forget = torch.zeros(1, 1024), torch.full((1, 1024), -0.1)
    empty = mlstm.empty_state((1,), 4, key.device, key.dtype)
    with LargestTensor() as mode:
        mlstm.chunked(empty, key, value, gate, log_forget, query)
    assert mode.elements <= 1024 * 64


def loaded(weights: list[twin.HeadWeights], memory: bool, d: int) -> scorers.MLPScorer:
    """The scorer of one layer with the twin's weights."""
    normed = weights[0].norm is not None
    scorer = (scorers.MLSTMScorer if memory else scorers.MLPScorer)(len(weights), d, len(weights[0].b1), normed)
    scorer.load_state_dict({name: tensor.float() for name, tensor in twin.tensors(weights).items()})
    return scorer


@quick
@given(
    seed=st.integers(0, 20),
    d=st.sampled_from([2, 8]),
    heads=st.integers(1, 3),
    length=st.integers(1, 40),
    window=st.one_of(st.integers(1, 8), st.integers(1, 50)),
    memory=st.booleans(),
    normed=st.booleans(),
)
def test_scorers_equal_their_twin(
    seed: int, d: int, heads: int, length: int, window: int, memory: bool, normed: bool
) -> None:
    (weights,) = twin.random_weights(seed, 1, heads, d, memory, normed)
    keys, values = torch.randn(2, 2, heads, length, d, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        found = loaded(weights, memory, d)(keys, values, window)
    assert found.shape == (2, heads, length)
    assert found.dtype == torch.float32
    for row in range(2):
        for head in range(heads):
            k, v = keys[row, head].double(), values[row, head].double()
            for t in range(length):
                score = (
                    twin.memory_score(weights[head], k, v, t, window)
                    if memory
                    else twin.mlp_score(weights[head], k, v, t)
                )
                torch.testing.assert_close(found[row, head, t].double(), score, atol=1e-3, rtol=1e-4)


def test_the_head_norm_takes_the_scale_of_an_answer_out() -> None:
    """Products that cancel in the denominator leave an answer a thousand times as large: the score moves without a
    norm, and not with one."""
    (plain,), (normed,) = twin.random_weights(0, 1, 1, 4, True), twin.random_weights(0, 1, 1, 4, True, True)
    z, answer = torch.randn(2, 1, 1, 3, 8, generator=torch.Generator().manual_seed(0))
    answer = answer[..., :4]
    for weights, moves in ((plain, True), (normed, False)):
        scorer = loaded(weights, True, 4)
        assert isinstance(scorer, scorers.MLSTMScorer)
        with torch.no_grad():
            small, large = scorer.score_answered(z, answer), scorer.score_answered(z, 1000 * answer)
        assert bool(((small - large).abs() > 0.1).any()) == moves


def test_the_score_of_a_token_waits_for_exactly_the_window() -> None:
    """It changes with the token window - 1 after it and not with the next; without a memory with none."""
    window, length, d = 5, 20, 4
    (weights,) = twin.random_weights(0, 1, 1, d, True)
    scorer = loaded(weights, True, d)
    keys, values = torch.randn(2, 1, 1, length, d, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = scorer(keys, values, window)[0, 0]
        for changed in range(length):
            other = values.clone()
            other[0, 0, changed] += 1
            moved = (scorer(keys, other, window)[0, 0] - before).abs() > 1e-6
            assert not moved[: max(0, changed - window + 1)].any()
            assert moved[max(0, changed - window + 1) : changed + 1].all()
