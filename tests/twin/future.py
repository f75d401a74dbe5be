"""Future attention from its definition: the whole causal matrix, then one key after the other."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Label = Literal["mean", "max"]


def causal_logits(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """`[heads, u, t]` float64 of query `[heads, S, d]` and key `[kv_heads, S, d]`; -inf where t comes after u."""
    heads, length, _ = query.shape
    group = heads // key.shape[0]
    logits = torch.full((heads, length, length), -math.inf, dtype=torch.float64)
    for head in range(heads):
        products = query[head].double() @ key[head // group].double().T * scaling
        for u in range(length):
            logits[head, u, : u + 1] = products[u, : u + 1]
    return logits


def normalisers(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """`[heads, S]`: the log of what each query's softmax divides by."""
    return causal_logits(query, key, scaling).logsumexp(-1)


def future_attention(
    query: Tensor, key: Tensor, *, window: int, scaling: float, label: Label, given: Tensor | None = None
) -> Tensor:
    """`[heads, S]`, plain numbers: for key t the mean or the largest p(u, t) over u = t + window .. S - 1.

    The mean divides by max(1, S - t - window). given: other normalisers `[heads, S]` than the softmax's own.
    """
    logits = causal_logits(query, key, scaling)
    divided_by = logits.logsumexp(-1) if given is None else given.double()
    heads, length, _ = logits.shape
    found = torch.zeros(heads, length, dtype=torch.float64)
    for head in range(heads):
        probs = torch.exp(logits[head] - divided_by[head][:, None])
        for t in range(length):
            later = probs[t + window :, t]
            if len(later) and label == "mean":
                found[head, t] = later.sum() / max(1, length - t - window)
            elif len(later):
                found[head, t] = later.max()
    return found


def future_labels(
    query: Tensor, key: Tensor, *, window: int, scaling: float, label: Label, eps: float, given: Tensor | None = None
) -> Tensor:
    """`[kv_heads, S]`: log(eps + attention) of the query head that looks most."""
    by_head = future_attention(query, key, window=window, scaling=scaling, label=label, given=given)
    kv_heads = key.shape[0]
    return (eps + by_head.view(kv_heads, -1, by_head.shape[-1])).log().max(1).values
