"""Sparse attention in training: each query sees the keys that a policy would have kept for it.

A key is seen by its own query and later ones up to its expiry, the first query that no longer sees it. An evicted
entry never returns, so one number a key is enough, and no mask of shape [S, S] is ever held. Gradients reach queries,
keys, values and penalties. Plain torch works in tiles of queries; on CUDA, FlexAttention does it in one kernel.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evictbench.cache.rope import rotate
from evictbench.policy.learner import Visible

if TYPE_CHECKING:
    from evictbench.policy.learner import Features, Student


TILE = 256
"""Queries attended at a time in plain torch."""


def attend_visible(query: Tensor, key: Tensor, value: Tensor, visible: Visible, scaling: float) -> Tensor:
    """The output `[rows, heads, S, head_dim]` of query `[rows, heads, S, head_dim]` over the visible ones of key and
    value `[rows, kv_heads, S, head_dim]`."""
    query, key = _with_moved_sinks(query, key, visible)
    if query.is_cuda:
        return _flex(query, key, value, visible, scaling)
    return _tiled(query, key, value, visible, scaling)


@torch.no_grad()
def visible_normalisers(query: Tensor, key: Tensor, visible: Visible, scaling: float) -> Tensor:
    """The log of what each query's softmax over its visible keys divides by, `[rows, heads, S]` float32 or wider.

    query, key: as in `attend_visible`. Keys with a penalty or moved sinks are not supported: no learner asks for them.
    """
    assert visible.penalty is None
    assert not visible.sinks
    rows, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.view(rows, kv_heads, heads // kv_heads, length, head_dim)
    positions = torch.arange(length, device=query.device)
    parts = []
    for start in range(0, length, TILE):
        end = min(start + TILE, length)
        queries, keys = positions[start:end, None], positions[:end]
        seen = (keys <= queries) & ((queries < visible.expiry[:, :, None, :end]) | (keys == queries))
        logits = grouped[:, :, :, start:end].to(wide) @ key[:, :, None, :end].to(wide).transpose(-1, -2) * scaling
        parts.append(logits.masked_fill(~seen[:, :, None], -torch.inf).logsumexp(-1))
    return torch.cat(parts, dim=-1).flatten(1, 2)


class StudentAttention:
    """The `dense_attention` of one forward pass of a student, which says once a layer what is visible.

    A checkpointed layer attends twice, the second time from its recomputed activations; the first answer stands.
    """

    def __init__(self, student: Student) -> None:
        self.student = student
        self.visible: dict[int, Visible] = {}

    def __call__(
        self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """The output of one layer."""
        if layer not in self.visible:
            with torch.no_grad():
                self.visible[layer] = self.student.visible(layer, module, query.detach(), key.detach(), value.detach())
        return attend_visible(query, key, value, self.visible[layer], scaling)

    def features(self) -> Features | None:
        """The tensors that the learner's loss needs of the pass; None if it needs none."""
        return self.student.features()


def _with_moved_sinks(query: Tensor, key: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
    """Queries and keys of twice the width, whose products have the sinks at their in-cache distance.

    The first half holds the queries as they are, against all keys but the sinks. The second half holds the queries
    rotated back, against the sinks alone.
    """
    if not visible.sinks or visible.shift is None:
        return query, key
    assert visible.inv_freq is not None
    unrotated = rotate(query, -visible.shift[None, None], visible.inv_freq)
    is_sink = torch.arange(key.shape[2], device=key.device)[:, None] < visible.sinks
    zero = key.new_zeros(())
    return (
        torch.cat([query, unrotated], dim=-1),
        torch.cat([torch.where(is_sink, zero, key), torch.where(is_sink, key, zero)], dim=-1),
    )


def _tiled(query: Tensor, key: Tensor, value: Tensor, visible: Visible, scaling: float) -> Tensor:
    rows, heads, length, _ = query.shape
    kv_heads = key.shape[1]
    positions = torch.arange(length, device=query.device)
    outputs = []
    for start in range(0, length, TILE):
        end = min(start + TILE, length)
        queries, keys = positions[start:end, None], positions[:end]
        kept = queries < visible.expiry[:, :, None, :end]
        seen = (keys <= queries) & (kept | (keys == queries))
        bias = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        if visible.penalty is not None:
            late = queries - keys > visible.window
            bias = bias + late * visible.penalty[:, :, None, :end].to(query.dtype)
        bias = bias.masked_fill(~seen, -torch.inf)
        bias = bias.expand(rows, kv_heads, -1, -1).repeat_interleave(heads // kv_heads, dim=1)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, :end],
                value[:, :, :end],
                attn_mask=bias,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, dim=2)


def _flex(query: Tensor, key: Tensor, value: Tensor, visible: Visible, scaling: float) -> Tensor:
    """`_tiled` in one kernel, which reads the expiry itself. Only blocks beyond the diagonal are skipped."""
    length = query.shape[2]
    group, shared = query.shape[1] // key.shape[1], visible.expiry.shape[1] == 1
    expiry, penalty, window = visible.expiry.contiguous(), visible.penalty, visible.window

    def score(logit: Tensor, row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        kv_head = 0 if shared else head // group
        if penalty is not None:
            logit = torch.where(q - k > window, logit + penalty[row, kv_head, k], logit)
        seen = (q < expiry[row, kv_head, k]) | (q == k)
        return torch.where(seen, logit, -torch.inf)

    output = _compiled(query.is_cuda)(
        query,
        key,
        value,
        score_mod=score,
        block_mask=_causal_blocks(length, query.device),
        scale=scaling,
        enable_gqa=True,
    )
    assert isinstance(output, Tensor)
    return output


@cache
def _compiled(fused: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if fused else flex_attention


@cache
def _causal_blocks(length: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda row, head, q, k: q >= k, None, None, length, length, device)
