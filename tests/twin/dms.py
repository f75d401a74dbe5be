"""The twin of DMS: which positions each query sees, written down from the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twin.model import DenseModel

Marks = Callable[[int, int, int], bool]
"""(layer, kv_head, position): what the gate says when it reads the token at this position."""


def sees(marks: Marks, layer: int, kv_head: int, query: int, window: int, sinks: int = 0) -> list[int]:
    """The positions that a query sees: the token at t is gone for queries after t + window if the gate, reading the
    token at t + 1, said so, and t is no sink."""
    return [
        t
        for t in range(query + 1)
        if not (query > t + window and t >= sinks and t + 1 <= query and marks(layer, kv_head, t + 1))
    ]


def separate_marks(
    model: PreTrainedModel,
    tokens: Sequence[int],
    weight: Tensor,
    bias: Tensor,
    *,
    threshold: float,
    window: int,
    sinks: int,
    epsilon: float,
) -> dict[tuple[int, int, int], bool]:
    """Marks of a gate on each layer's input, which depends on what the layers below could see."""
    dense = DenseModel(model)
    found: dict[tuple[int, int, int], bool] = {}
    with torch.no_grad():
        hidden = dense.embed(tokens)
        for layer in range(dense.layers):
            normed = hidden / (hidden.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
            for position in range(len(tokens)):
                for head in range(dense.kv_heads):
                    z = 100 * (float(normed[position] @ weight[layer, head]) + float(bias[layer, head])) - 5
                    found[layer, head, position] = z > threshold
            hidden = _layer(dense, layer, hidden, lambda la, h, q: sees(_of(found), la, h, q, window, sinks))
    return found


def borrowed(
    model: PreTrainedModel, tokens: Sequence[int], *, threshold: float, window: int
) -> tuple[dict[tuple[int, int, int], bool], Tensor]:
    """Marks read from the last channel of each group's first query head, and the logits `[tokens, vocabulary]` of a
    model that goes on without that channel, before its rotation and after it."""
    dense = DenseModel(model)
    found: dict[tuple[int, int, int], bool] = {}
    with torch.no_grad():
        hidden = dense.embed(tokens)
        for layer in range(dense.layers):
            queries = dense.project(layer, hidden)[0]
            for position in range(len(tokens)):
                for head in range(dense.kv_heads):
                    z = 100 * float(queries[position, head * dense.group, -1]) - 5
                    found[layer, head, position] = z > threshold
            hidden = _layer(
                dense, layer, hidden, lambda la, h, q: sees(_of(found), la, h, q, window), without_channel=True
            )
        return found, dense.logits(hidden)


def _of(found: dict[tuple[int, int, int], bool]) -> Marks:
    return lambda layer, head, position: found[layer, head, position]


def _layer(
    dense: DenseModel,
    layer: int,
    hidden: Tensor,
    visible: Callable[[int, int, int], Sequence[int]],
    without_channel: bool = False,
) -> Tensor:
    queries, keys, values = dense.project(layer, hidden)
    if without_channel:
        queries[:, :: dense.group, -1] = 0
    everyone = range(len(hidden))
    queries, keys = dense.rotate(queries, everyone), dense.rotate(keys, everyone)
    if without_channel:
        queries[:, :: dense.group, -1] = 0
    attended = torch.zeros_like(queries)
    for query in everyone:
        for head in range(dense.heads):
            seen = list(visible(layer, head // dense.group, query))
            probs = dense.softmax(layer, queries[query, head], keys[seen, head // dense.group])
            attended[query, head] = probs @ values[seen, head // dense.group]
    return dense.finish(layer, hidden, attended)
