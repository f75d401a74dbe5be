"""The mLSTM memory: gated outer products of value and key features, read with a query (xLSTM, arXiv 2405.04517).

Let `i` be the input gate's exponent and `log f` the logarithm of the forget gate. For one head:

    m_t = max(log f_t + m_{t-1}, i_t)
    C_t = exp(log f_t + m_{t-1} - m_t) C_{t-1} + exp(i_t - m_t) value_t key_t^T
    n_t = exp(log f_t + m_{t-1} - m_t) n_{t-1} + exp(i_t - m_t) key_t
    read(q) = C_t q / max(|n_t · q|, exp(-m_t))

`step` is that recurrence for one token. `chunked` computes it for many tokens, as attention inside a chunk and the
state before it. Both take leading dimensions `[..]` and keep float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

EMPTY = -1e4
"""`m` of an empty state: below any gate, and finite, so that no difference of infinities arises."""

CHUNK = 64
_LARGEST_EXPONENT = 80.0


class State(NamedTuple):
    """memory `[.., head_dim, head_dim]` (value by key), normaliser `[.., head_dim]`, stabiliser `[..]`."""

    memory: Tensor
    normaliser: Tensor
    stabiliser: Tensor


def empty_state(shape: tuple[int, ...], head_dim: int, device: torch.device, dtype: torch.dtype) -> State:
    """A state without tokens. shape: the leading dimensions."""
    return State(
        torch.zeros((*shape, head_dim, head_dim), device=device, dtype=dtype),
        torch.zeros((*shape, head_dim), device=device, dtype=dtype),
        torch.full(shape, EMPTY, device=device, dtype=dtype),
    )


def step(state: State, key: Tensor, value: Tensor, input_gate: Tensor, log_forget: Tensor) -> State:
    """The state after one token: key, value `[.., head_dim]`; gates `[..]`, an input_gate of -inf writes nothing."""
    kept = log_forget + state.stabiliser
    stabiliser = torch.maximum(kept, input_gate)
    keep, write = (kept - stabiliser).exp(), (input_gate - stabiliser).exp()
    written = write[..., None] * key
    return State(
        keep[..., None, None] * state.memory + value[..., :, None] * written[..., None, :],
        keep[..., None] * state.normaliser + written,
        stabiliser,
    )


def read(state: State, query: Tensor) -> Tensor:
    """The answer `[.., head_dim]` of a state to a query `[.., head_dim]`."""
    return _normalised(_product(state.memory, query), state.normaliser, state.stabiliser, query)


def _product(memory: Tensor, query: Tensor) -> Tensor:
    """`C q`, as a row times a matrix: BLAS takes several times as long for a batch of matrices times a column."""
    return (query[..., None, :] @ memory.mT)[..., 0, :]


def _normalised(product: Tensor, normaliser: Tensor, stabiliser: Tensor, query: Tensor) -> Tensor:
    norm = (normaliser * query).sum(-1).abs()
    return product / torch.maximum(norm, (-stabiliser).clamp(max=_LARGEST_EXPONENT).exp())[..., None]


def step_and_read(
    states: Sequence[State], key: Tensor, value: Tensor, input_gate: Tensor, log_forget: Tensor, query: Tensor
) -> Tensor:
    """`step`, in place, and `read` for several layers' states, without a copy of any memory: `[rows, heads, head_dim]`.

    states: one for each layer, with leading dimensions `[rows, heads of the layer]`. key, value, query: `[rows, heads,
    head_dim]`, the heads of all layers side by side, as in the answer. input_gate, log_forget: `[rows, heads]`.
    """
    heads = states[0].stabiliser.shape[-1]
    normaliser, before = (torch.cat([state[index] for state in states], dim=1) for index in (1, 2))
    kept = log_forget + before
    stabiliser = torch.maximum(kept, input_gate)
    keep, write = (kept - stabiliser).exp(), (input_gate - stabiliser).exp()
    written = write[..., None] * key
    normaliser = keep[..., None] * normaliser + written
    parts = (part.split(heads, dim=1) for part in (keep, value, written, query, normaliser, stabiliser))
    products = []
    for state, kept_part, value_part, written_part, query_part, *small in zip(states, *parts, strict=True):
        state.memory.mul_(kept_part[..., None, None]).addcmul_(value_part[..., None], written_part[..., None, :])
        products.append(_product(state.memory, query_part))
        for old, new in zip(state[1:], small, strict=True):
            old.copy_(new)
    return _normalised(torch.cat(products, dim=1), normaliser, stabiliser, query)


def chunked(
    state: State, key: Tensor, value: Tensor, input_gate: Tensor, log_forget: Tensor, query: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, State]:
    """The answers `[.., S, head_dim]` to many queries, and the state after the last token.

    key, value, query: `[.., S, head_dim]`. input_gate, log_forget: `[.., S]`. Query t reads after token t was written.
    """
    answers = []
    for start in range(0, key.shape[-2], chunk):
        part = slice(start, start + chunk)
        answer, state = _one_chunk(
            state, key[..., part, :], value[..., part, :], input_gate[..., part], log_forget[..., part],
            query[..., part, :],
        )  # fmt: skip
        answers.append(answer)
    return (torch.cat(answers, dim=-2) if answers else torch.zeros_like(query)), state


def _one_chunk(
    state: State, key: Tensor, value: Tensor, input_gate: Tensor, log_forget: Tensor, query: Tensor
) -> tuple[Tensor, State]:
    length = key.shape[-2]
    forgotten = log_forget.cumsum(-1)
    # The logarithms of what is left after token t, of token s [.., t, s] and of the state before. Sums start at s: in a
    # difference of sums from the chunk's start, what is long forgotten would cost digits.
    causal = torch.ones(length, length, dtype=torch.bool, device=key.device).tril()
    since = log_forget[..., :, None].expand(*log_forget.shape, length).masked_fill(~causal.tril(-1), 0.0).cumsum(-2)
    left = (since + input_gate[..., None, :]).masked_fill(~causal, -torch.inf)
    before = forgotten + state.stabiliser[..., None]
    stabiliser = torch.maximum(left.amax(-1), before)
    weight = (left - stabiliser[..., None]).exp()
    carried = (before - stabiliser).exp()
    attention = weight * (query @ key.transpose(-1, -2))
    product = attention @ value + carried[..., None] * (query @ state.memory.transpose(-1, -2))
    norm = attention.sum(-1) + carried * (query @ state.normaliser[..., None])[..., 0]
    answer = product / torch.maximum(norm.abs(), (-stabiliser).clamp(max=_LARGEST_EXPONENT).exp())[..., None]
    written = weight[..., -1, :, None] * key
    return answer, State(
        carried[..., -1, None, None] * state.memory + value.transpose(-1, -2) @ written,
        carried[..., -1, None] * state.normaliser + written.sum(-2),
        stabiliser[..., -1],
    )
