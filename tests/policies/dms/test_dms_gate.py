"""DMS's gates against their definition, written out by position and head."""

from __future__ import annotations

import pytest
import torch

from evictbench.policies.dms import gate

pytestmark = pytest.mark.engine

ROWS, TOKENS, KV_HEADS, GROUP, HEAD_DIM, HIDDEN = 2, 7, 3, 2, 8, 24


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_fresh_separate_gate_marks_nothing() -> None:
    fresh = gate.SeparateGate(torch.zeros(2, KV_HEADS, HIDDEN), torch.zeros(2, KV_HEADS))
    z = fresh.logits(1, 50 * drawn(ROWS, TOKENS, HIDDEN).float())
    assert z.shape == (ROWS, KV_HEADS, TOKENS)
    assert torch.equal(z, torch.full_like(z, -5.0))


def test_separate_gate_is_a_norm_and_one_row_of_weights_a_head() -> None:
    weight, bias, epsilon = drawn(2, KV_HEADS, HIDDEN, seed=1), drawn(2, KV_HEADS, seed=2), 0.3
    hidden = drawn(ROWS, TOKENS, HIDDEN, seed=3)
    z = gate.SeparateGate(weight, bias, epsilon).logits(1, hidden)
    for row in range(ROWS):
        for token in range(TOKENS):
            state = hidden[row, token]
            state = state / (sum(float(channel) ** 2 for channel in state) / HIDDEN + epsilon) ** 0.5
            for head in range(KV_HEADS):
                expected = 100 * (float(state @ weight[1, head]) + float(bias[1, head])) - 5
                assert float(z[row, head, token]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_read_narrow_states_in_float32(dtype: torch.dtype) -> None:
    separate = gate.SeparateGate(drawn(1, KV_HEADS, HIDDEN).float(), drawn(1, KV_HEADS).float())
    hidden = drawn(ROWS, TOKENS, HIDDEN, seed=4).to(dtype)
    z = separate.logits(0, hidden)
    assert z.dtype == torch.float32
    assert torch.equal(z, separate.logits(0, hidden.float()))
    queries = drawn(ROWS, TOKENS, KV_HEADS * GROUP, HEAD_DIM).to(dtype)
    borrowed = gate.BorrowedGate(KV_HEADS).logits(queries)
    assert torch.equal(borrowed, gate.BorrowedGate(KV_HEADS).logits(queries.float()))


def test_borrowed_gate_is_the_last_channel_of_each_groups_first_head() -> None:
    queries = drawn(ROWS, TOKENS, KV_HEADS * GROUP, HEAD_DIM)
    z = gate.BorrowedGate(KV_HEADS).logits(queries)
    shared = gate.BorrowedGate(KV_HEADS, shared=True).logits(queries)
    for head in range(KV_HEADS):
        torch.testing.assert_close(z[:, head], 100 * queries[:, :, head * GROUP, HEAD_DIM - 1] - 5)
        assert torch.equal(shared[:, head], z[:, 0])
    at = torch.tensor([0.0499, 0.0501], dtype=torch.float64)
    marks = gate.logits(at) > 0
    assert marks.tolist() == [False, True]


@pytest.mark.parametrize("heads_at", [1, 2])
def test_the_borrowed_channel_is_zeroed_and_nothing_else(heads_at: int) -> None:
    queries = drawn(ROWS, TOKENS, KV_HEADS * GROUP, HEAD_DIM)
    queries = queries.transpose(1, 2) if heads_at == 1 else queries
    before = queries.clone()
    changed = gate.BorrowedGate(KV_HEADS).without_channel(queries, heads_at)
    assert torch.equal(queries, before)
    by_head, was = changed.movedim(heads_at, 0), queries.movedim(heads_at, 0)
    for head in range(KV_HEADS * GROUP):
        for channel in range(HEAD_DIM):
            gone = head % GROUP == 0 and channel == HEAD_DIM - 1
            expected = torch.zeros_like(was[head, ..., channel]) if gone else was[head, ..., channel]
            assert torch.equal(by_head[head, ..., channel], expected)


def test_the_next_tokens_logit_governs() -> None:
    z = drawn(ROWS, KV_HEADS, TOKENS)
    governing = gate.governing(z)
    for token in range(TOKENS - 1):
        assert torch.equal(governing[..., token], z[..., token + 1])
    assert torch.equal(governing[..., -1], torch.zeros(ROWS, KV_HEADS, dtype=z.dtype))
