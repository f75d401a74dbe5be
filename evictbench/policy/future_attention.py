"""How much attention each key receives from the queries that come after it has left the recent window.

For one query head, key t and the queries u = t + window .. S - 1 of a text of S tokens, with p the causal softmax:
the mean `m_t = (1 / N_t) Σ_u p_{u→t}`, `N_t = max(1, S - t - window)`, or the largest `max_u p_{u→t}`.
`log Σ_u p_{u→t}` is the log-sum-exp over u of `ℓ(u, t) - LSE_u`, which is what an attention kernel returns as its
normaliser once keys and queries change places (KVpop, arXiv 2607.05061 v2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from evictbench.policy.tiles import TILE_ELEMENTS

Label = Literal["mean", "max"]

LABELS: tuple[Label, ...] = ("mean", "max")

SEVERAL_WINDOWS_TILE = 128
"""Queries at a time where labels are wanted behind several windows: only the keys that some of them look back at are
reduced once for each."""

EPSILON = 1e-9
"""Added to a label before its logarithm; the paper does not say how much it adds."""


def future_labels(
    query: Tensor,
    key: Tensor,
    *,
    window: int,
    scaling: float,
    label: Label = "mean",
    normalisers: Tensor | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """`log(epsilon + attention)`, the largest over the query heads of a KV head: `[rows, kv_heads, S]` float32.

    Arguments as in `future_attention`.
    """
    attention = future_attention(query, key, window=window, scaling=scaling, label=label, normalisers=normalisers)
    return (attention.exp() + epsilon).log().amax(2)


def labels_behind(
    query: Tensor,
    key: Tensor,
    *,
    windows: Sequence[int],
    scaling: float,
    labels: Sequence[Label] = LABELS,
    normalisers: Tensor | None = None,
    epsilon: float = EPSILON,
) -> dict[tuple[Label, int], Tensor]:
    """`future_labels` by label and window, from probabilities that are computed once. Arguments as in
    `future_attention`."""
    found = _all(query, key, windows, scaling, labels, normalisers)
    return {name: (attention.exp() + epsilon).log().amax(2) for name, attention in found.items()}


def future_attention(
    query: Tensor,
    key: Tensor,
    *,
    window: int,
    scaling: float,
    label: Label = "mean",
    normalisers: Tensor | None = None,
) -> Tensor:
    """The logarithm of each key's label, `[rows, kv_heads, group, S]` float32 or wider; -inf where nothing looks at it.

    query: `[rows, heads, S, head_dim]`, rotated; key: `[rows, kv_heads, S, head_dim]`, as cached. normalisers:
    `LSE_u` of each query, `[rows, heads, S]`, if they are not those of full causal attention (a sparse student's
    own). Memory is linear in S: probabilities exist in tiles of queries, or on CUDA, for the mean, inside
    FlexAttention's kernel.
    """
    return _all(query, key, (window,), scaling, (label,), normalisers)[label, window]


def _all(
    query: Tensor,
    key: Tensor,
    windows: Sequence[int],
    scaling: float,
    labels: Sequence[Label],
    normalisers: Tensor | None,
) -> dict[tuple[Label, int], Tensor]:
    """The logarithm of each key's label, by label and window."""
    fused = "mean" in labels and query.device.type == "cuda"
    tiled = [label for label in labels if label != "mean" or not fused]
    found = _by_tiles(query, key, windows, scaling, tiled, normalisers) if tiled else {}
    for window in windows if fused else ():
        found["mean", window] = _by_flex_attention(query, key, window, scaling, normalisers)
    length = key.shape[2]
    for (label, window), total in found.items():
        if label == "mean":
            count = (length - window - torch.arange(length, device=key.device)).clamp(min=1)
            found[label, window] = total - count.log()
    return found


def _by_tiles(
    query: Tensor,
    key: Tensor,
    windows: Sequence[int],
    scaling: float,
    labels: Sequence[Label],
    normalisers: Tensor | None,
) -> dict[tuple[Label, int], Tensor]:
    """`log Σ_u p` and `log max_u p`, by label and window, one tile of queries after the other."""
    rows, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.view(rows, kv_heads, group, length, head_dim)
    given = None if normalisers is None else normalisers.view(rows, kv_heads, group, length)
    empty = torch.zeros((rows, kv_heads, group, length), dtype=wide, device=query.device)
    found = {(label, window): empty.clone() for label in labels for window in windows}
    tile = max(1, TILE_ELEMENTS.get(query.device.type, 2**22) // max(1, rows * heads * length))
    if len(windows) > 1:
        tile = min(tile, SEVERAL_WINDOWS_TILE)
    for start in range(0, length, tile):
        stop = min(length, start + tile)
        most = stop - min(windows)  # keys that a query of this tile may look back at
        if most <= 0:
            continue
        width = stop if given is None else most
        part = grouped[:, :, :, start:stop].reshape(rows, kv_heads, -1, head_dim)
        logits = part.to(wide) @ key[:, :, :width].to(wide).transpose(-1, -2) * scaling
        logits = logits.view(rows, kv_heads, group, stop - start, width)
        if given is None:
            future = torch.ones(stop - start, width, dtype=torch.bool, device=query.device).triu(start + 1)
            probs = logits.masked_fill_(future, -torch.inf).softmax(-1)
        else:
            probs = (logits - given[..., start:stop, None]).exp()
        reduced = {label: _reduced(label, probs[..., : max(0, start - min(windows) + 1)]) for label in labels}
        for window in windows:
            looked_at = stop - window
            if looked_at <= 0:
                continue
            # All queries of the tile look back at the keys before `by_all`, whatever the window; at the others, some.
            by_all = max(0, start - window + 1)
            by_some = probs[..., by_all:looked_at].tril(start - window - by_all)
            for label in labels:
                values = torch.cat([reduced[label][..., :by_all], _reduced(label, by_some)], dim=-1)
                part_found = found[label, window][..., :looked_at]
                if label == "mean":
                    part_found += values
                else:
                    torch.maximum(part_found, values, out=part_found)
    return {name: total.log() for name, total in found.items()}


def _reduced(label: Label, probs: Tensor) -> Tensor:
    """The sum or the largest over queries, `[.., keys]` of `[.., queries, keys]`."""
    return probs.sum(-2) if label == "mean" else probs.amax(-2)


def _by_flex_attention(query: Tensor, key: Tensor, window: int, scaling: float, normalisers: Tensor | None) -> Tensor:
    """`log Σ_u p`: the normaliser of an attention call in which keys ask and queries answer."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    rows, heads, length, _ = query.shape
    kv_heads = key.shape[1]
    device = query.device
    on_gpu = device.type == "cuda"
    attend: Any = torch.compile(flex_attention) if on_gpu else flex_attention
    mask: Any = torch.compile(create_block_mask) if on_gpu else create_block_mask
    asking = key.repeat_interleave(heads // kv_heads, dim=1)
    if normalisers is None:
        causal = mask(lambda row, head, u, t: t <= u, None, None, length, length, device=device)
        _, aux = attend(query, asking, asking, block_mask=causal, scale=scaling, return_aux=AuxRequest(lse=True))
        assert isinstance(aux.lse, Tensor)
        normalisers = aux.lse
    of_query = normalisers

    def minus_normaliser(score: Tensor, row: Tensor, head: Tensor, t: Tensor, u: Tensor) -> Tensor:
        return score - of_query[row, head, u]

    later = mask(lambda row, head, t, u: u >= t + window, None, None, length, length, device=device)
    _, aux = attend(
        asking,
        query,
        query,
        score_mod=minus_normaliser,
        block_mask=later,
        scale=scaling,
        return_aux=AuxRequest(lse=True),
    )
    total = aux.lse
    assert isinstance(total, Tensor)
    empty = torch.arange(length, device=device) + window >= length
    total = total.float().masked_fill(empty, -torch.inf)
    return total.view(rows, kv_heads, heads // kv_heads, length)
