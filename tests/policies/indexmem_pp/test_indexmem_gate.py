"""IndexMem++'s training gate against its definition, key by key in float64: what it gives, and where gradients go."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evictbench.policies.indexmem_pp import gate as gates
from evictbench.policies.indexmem_pp.gate import Gate, attend_gated

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALING = 0.3
NAMES = ("query", "key", "value", "score", "rate", "gate_scale")


@pytest.fixture(params=[1, 2**21], ids=["tiles", "one-tile"])
def _tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of 16 queries, the least there are, and all at once."""
    monkeypatch.setattr(gates, "ELEMENTS", (request.param, request.param))


def inputs(length: int, seed: int = 0, rows: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value, score, rate and gate_scale, each with a gradient. Rates are large enough to matter."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found = [
        normal(rows, HEADS, length, HEAD_DIM),
        normal(rows, KV_HEADS, length, HEAD_DIM),
        normal(rows, KV_HEADS, length, HEAD_DIM),
        normal(rows, KV_HEADS, length),
        -2_000 * normal(rows, KV_HEADS, length).abs(),
        1 + 0.3 * normal(1),
    ]
    return [tensor.to(dtype).requires_grad_() for tensor in found]


def attend(given: list[Tensor], gate: Gate) -> tuple[Tensor, Tensor]:
    query, key, value, score, rate, gate_scale = given
    found: tuple[Tensor, Tensor] = attend_gated(query, key, value, score, rate, gate_scale, gate, SCALING)
    return found


def twin(given: list[Tensor], gate: Gate) -> Tensor:
    """The definition, one query at a time: factors in front of exponentials, which are then normalised."""
    query, key, value, score, rate, gate_scale = given
    rows, heads, length, _ = query.shape
    output = []
    for row in range(rows):
        for head in range(heads):
            group = head // (heads // key.shape[1])
            for i in range(length):
                scores = gate_scale * torch.stack(
                    [score[row, group, j] + rate[row, group, j] * (i - j) / 16384 for j in range(i + 1)]
                )
                evictable = [j for j in range(i + 1) if j >= gate.sinks and i - j >= gate.window]
                factors = torch.ones(i + 1, dtype=query.dtype)
                if gate.beta is None:
                    factors = scores.exp()
                elif len(evictable) > gate.beta:
                    chosen = torch.tensor(evictable)
                    factors = factors.index_put((chosen,), gate.beta * scores[chosen].softmax(0))
                weights = factors * (SCALING * (key[row, group, : i + 1] @ query[row, head, i])).exp()
                output.append((weights / weights.sum()) @ value[row, group, : i + 1])
    return torch.stack(output).view_as(query)


def slopes(output: Tensor, given: list[Tensor], seed: int = 9) -> list[Tensor]:
    """Gradients of a random reading of the output; those that nothing reaches as zeros."""
    reading = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = torch.autograd.grad((output * reading.to(output.dtype)).sum(), given, allow_unused=True)
    return [torch.zeros_like(tensor) if slope is None else slope for slope, tensor in zip(found, given, strict=True)]


def check(length: int, gate: Gate, seed: int = 0, rows: int = 1) -> list[Tensor]:
    """Output and gradients as the twin's; the gradients."""
    given = inputs(length, seed, rows)
    output, _ = attend(given, gate)
    expected = twin(given, gate)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    found = slopes(output, given)
    torch.testing.assert_close(found, slopes(expected, given), rtol=1e-9, atol=1e-11)
    return found


@pytest.mark.usefixtures("_tiling")
def test_output_and_gradients_are_the_definitions() -> None:
    found = check(36, Gate(sinks=2, window=5, beta=6.0), rows=2)
    for name, slope in zip(NAMES, found, strict=True):
        assert slope.abs().max() > 1e-6, name


@settings(max_examples=10, deadline=None)
@given(
    length=st.integers(1, 20),
    sinks=st.integers(0, 4),
    window=st.integers(0, 6),
    beta=st.sampled_from([1.0, 2.5, 4.0, 30.0, None]),
    seed=st.integers(0, 3),
)
def test_any_sizes(length: int, sinks: int, window: int, beta: float | None, seed: int) -> None:
    """Texts that the gate never reaches, no sinks, no window, a beta of any kind."""
    check(length, Gate(sinks, window, beta), seed)


@pytest.mark.usefixtures("_tiling")
def test_the_first_query_that_is_changed_is_the_first_with_more_than_beta_to_evict() -> None:
    given = inputs(40)
    dense, _ = attend(given, Gate(0, 40, 1.0))
    for beta in (3.0, 3.5, 4.0):
        gate = Gate(2, 5, beta)
        output, _ = attend(given, gate)
        changed = [bool((output[0, :, i] - dense[0, :, i]).abs().max() > 1e-9) for i in range(40)]
        assert changed.index(True) == gate.first == 2 + 5 + math.floor(beta)
        assert all(changed[gate.first :])


def test_equal_scores_give_dense_attention_with_the_plain_gate_and_not_with_this_one() -> None:
    """The no-op that training would fall into: within reach of the plain gate, and of this one only up to beta."""
    query, key, value, _, _, _ = inputs(40)
    dense = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=SCALING, enable_gqa=True
    )
    nothing = torch.zeros(1, KV_HEADS, 40, dtype=torch.float64)
    gate, one = Gate(sinks=2, window=5, beta=6.0), torch.ones(1, dtype=torch.float64)
    for constant in (-3.0, 0.0, 2.0, 50.0):
        plain, _ = attend_gated(query, key, value, nothing + constant, nothing, one, Gate(2, 5, None), SCALING)
        torch.testing.assert_close(plain, dense, rtol=1e-9, atol=1e-11)
        output, _ = attend_gated(query, key, value, nothing + constant, nothing, one, gate, SCALING)
        away = (output - dense).abs().amax((0, 1, 3))
        assert (away[: gate.first] < 1e-11).all()
        assert (away[gate.first :] > 1e-4).all()


def test_the_shared_mass_is_beta_whatever_the_scores() -> None:
    """Equal logits: protected entries weigh 1 each and all the others together beta."""
    _, key, value, score, rate, scale = inputs(40)
    query = torch.zeros(1, HEADS, 40, HEAD_DIM, dtype=torch.float64)
    _, share = attend_gated(query, key, value, score, rate, scale, Gate(2, 5, 6.0), SCALING)
    assert float(share) == pytest.approx(6 / (6 + 2 + 5))
    _, none = attend_gated(query, key, value, score, rate, scale, Gate(2, 5, 33.0), SCALING)
    assert torch.isnan(none)


def test_a_constant_added_to_a_heads_scores_changes_nothing() -> None:
    query, key, value, score, rate, scale = inputs(30)
    gate = Gate(2, 4, 3.0)
    output, _ = attend_gated(query, key, value, score, rate, scale, gate, SCALING)
    moved, _ = attend_gated(query, key, value, score + 7, rate, scale, gate, SCALING)
    torch.testing.assert_close(output, moved)
    (slope,) = torch.autograd.grad((output * torch.arange(HEAD_DIM)).sum(), score)
    torch.testing.assert_close(slope.sum(-1), torch.zeros_like(slope[..., 0]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 6, 7, 40])
def test_nothing_to_evict_and_extreme_scores_give_numbers(dtype: torch.dtype, length: int) -> None:
    """Queries without evictable entries, and scores whose exponentials leave the range."""
    given = inputs(length, dtype=dtype)
    with torch.no_grad():
        given[3].mul_(1e4)
        given[4].mul_(1e3)
    output, _ = attend(given, Gate(2, 5, 1.0))
    assert output.dtype == dtype
    assert output.isfinite().all()
    for name, slope in zip(NAMES, slopes(output, given), strict=True):
        assert slope.isfinite().all(), name


def test_half_precision_is_computed_in_float32() -> None:
    """A bfloat16 model's attention is rounded at its ends and nowhere between."""
    given = inputs(40, dtype=torch.bfloat16)
    gate = Gate(2, 5, 6.0)
    output, _ = attend(given, gate)
    exact, _ = attend([tensor.float() for tensor in given], gate)
    assert torch.equal(output, exact.to(torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = attend([tensor.float() for tensor in given], gate)
    assert torch.equal(inside, exact)


def test_memory_does_not_grow_with_the_square_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for the backward pass is a few numbers a token, and tiles are as small as asked for."""
    monkeypatch.setattr(gates, "ELEMENTS", (HEADS * 256 * 16, 0))
    kept: dict[int, int] = {}
    sizes: list[int] = []
    plain = gates._tiles

    def watched(*arguments: object) -> Iterator[object]:
        for tile in plain(*arguments):  # type: ignore[arg-type]
            sizes.append(tile.probs.numel())
            yield tile

    monkeypatch.setattr(gates, "_tiles", watched)

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output, _ = attend(inputs(256, dtype=torch.float32), Gate(2, 5, 6.0))
    assert max(sizes) <= HEADS * 256 * 16
    assert sum(kept.values()) <= 256 * (2 * HEADS * HEAD_DIM + KV_HEADS * (2 * HEAD_DIM + 2)) + 1
    output.sum().backward()
    assert len(sizes) == 2 * 256 // 16
