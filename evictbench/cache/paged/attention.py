"""Attention over pages: a chunk of one row, or one new token of every row, each KV head over its own entries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evictbench.cache.paged.pool import PAGE, PagePool


def attend_chunk(
    pool: PagePool,
    first: int,
    query: Tensor,
    entries: Mapping[str, Tensor],
    scaling: float,
) -> Tensor:
    """Attention of one row's new tokens over the entries of its heads and over each other, `[heads, new, head_dim]`.

    first: the owner of the row's first KV head. query: `[heads, new, head_dim]`. entries: the new ones, `[kv_heads,
    new, ...]` for every buffer, at consecutive positions.
    """
    keys, values, expiry = entries["keys"], entries["values"], entries["expiry"]
    positions = entries["positions"][0]
    kv_heads, new, _ = keys.shape
    query = query.unflatten(0, (kv_heads, -1))
    if not any(pool.tables[first : first + kv_heads]) and bool(expiry.min() > positions[-1]):
        output = F.scaled_dot_product_attention(
            query.flatten(0, 1)[None], keys[None], values[None], is_causal=True, scale=scaling, enable_gqa=True
        )
        return output[0]
    causal = torch.ones((new, new), dtype=torch.bool, device=query.device).tril()
    output = torch.empty_like(query)
    for head in range(kv_heads):
        stored = len(pool.tables[first + head]) * PAGE
        held = {name: torch.cat((pool.entries(first + head, name), new[head])) for name, new in entries.items()}
        mask = held["expiry"] > positions[:, None]
        mask[:, stored:] &= causal
        # One KV head for all its queries, without a copy, in a form that every kernel takes.
        shared_keys = held["keys"].expand(1, query.shape[1], -1, -1)
        shared_values = held["values"].expand(1, query.shape[1], -1, -1)
        output[head] = F.scaled_dot_product_attention(
            query[head][None], shared_keys, shared_values, attn_mask=mask, scale=scaling
        )[0]
    return output.flatten(0, 1)


def attend_decode(
    pool: PagePool, query: Tensor, positions: Tensor, scaling: float, bias: Tensor | None = None
) -> Tensor:
    """Attention of one new token of each row, which has its slot already: `[rows, heads, 1, head_dim]`, like query.

    positions: `[owners]` int32, the token's position, once for each KV head of each row. bias: `[pages, 16]`, what
    `expiry_bias` gives for these positions, or `[heads, pages, 16]` for one product of all heads and pages; None: it is
    made here. If the pool has a buffer "bias", that is added to the logits instead, and hides slots by -inf. On a GPU
    FlexAttention is used, which needs no bias.
    """
    if query.device.type == "cuda":
        return _by_flex_attention(pool, query, positions, scaling)
    return by_page(pool, query, positions, scaling, bias)


def expiry_bias(expiry: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query sees an entry and -inf elsewhere, `[pages, 16]`, float32 or wider.

    expiry: `[pages, 16]`. positions: `[pages]`, that of the query of each page's owner. dtype: of the queries.
    """
    seen = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=expiry.device)
    return torch.where(expiry <= positions[:, None], -torch.inf, seen)


def by_page(pool: PagePool, query: Tensor, positions: Tensor, scaling: float, bias: Tensor | None = None) -> Tensor:
    """`attend_decode` on any device, in a few batched products.

    All pages meet their owners' queries where they lie, and the parts of the softmax are added up by owner.
    """
    owner, values = pool.owner, pool.buffers["values"]
    if bias is not None and bias.dim() == 3:
        return _in_one_product(pool, query, scaling, bias)
    if "bias" in pool.buffers:
        return _with_pool_bias(pool, query, positions.shape[0], scaling)
    if bias is None:
        bias = expiry_bias(pool.buffers["expiry"], positions.index_select(0, owner), query.dtype)
    own = query.reshape(positions.shape[0], -1, query.shape[-1])
    logits = _logits(own.index_select(0, owner), pool.buffers["keys"], bias, scaling)
    largest = logits.new_full(own.shape[:2], -torch.inf)
    largest.scatter_reduce_(0, owner[:, None].expand(-1, own.shape[1]), logits.amax(-1), "amax")
    weights = logits.sub_(largest.index_select(0, owner)[:, :, None]).exp_()
    total = torch.zeros_like(largest).index_add_(0, owner, weights.sum(-1))
    parts = torch.bmm(weights.to(values.dtype), values).to(bias.dtype)
    output = bias.new_zeros(own.shape).index_add_(0, owner, parts)
    return output.div_(total[:, :, None]).to(query.dtype).view(query.shape)


def _in_one_product(pool: PagePool, query: Tensor, scaling: float, bias: Tensor) -> Tensor:
    """`by_page` for few entries: every query meets all entries, and the bias hides those of other owners.

    That is more arithmetic than is needed, in a fraction of the operations.
    """
    keys, values = (pool.buffers[name].flatten(0, 1) for name in ("keys", "values"))
    own, bias = query.reshape(-1, query.shape[-1]), bias.flatten(1)
    if own.dtype == bias.dtype:
        logits = torch.addmm(bias, own, keys.t(), alpha=scaling)
    else:
        logits = torch.mm(own * scaling, keys.t()) + bias
    return torch.mm(logits.softmax(-1).to(values.dtype), values).view(query.shape)


def _logits(own: Tensor, keys: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """Logits `[pages, group, 16]` in the bias's dtype. own: `[pages, group, head_dim]`, the queries of each page's
    owner."""
    if own.dtype == bias.dtype:
        return torch.baddbmm(bias[:, None], own, keys.transpose(1, 2), alpha=scaling)
    return torch.bmm(own * scaling, keys.transpose(1, 2)) + bias[:, None]


def _with_pool_bias(pool: PagePool, query: Tensor, owners: int, scaling: float) -> Tensor:
    """`by_page` with the pool's own bias: each owner's logits are put side by side for one softmax."""
    keys, values, bias = (pool.buffers[name] for name in ("keys", "values", "bias"))
    table, missing, places = pool.layout()
    most = missing.shape[1]
    own = query.reshape(owners, -1, query.shape[-1]).index_select(0, pool.owner)
    beside = _logits(own, keys, bias, scaling).index_select(0, table[: owners * most]).unflatten(0, (owners, most))
    beside.masked_fill_(missing[:owners], -torch.inf)
    weights = beside.transpose(1, 2).flatten(2).softmax(-1).unflatten(-1, (most, PAGE))
    by_page = weights.transpose(1, 2).flatten(0, 1).index_select(0, places)
    parts = torch.bmm(by_page.to(values.dtype), values).to(bias.dtype)
    output = parts.new_zeros((owners, *parts.shape[1:])).index_add_(0, pool.owner, parts)
    return output.to(query.dtype).view(query.shape)


Attend = Callable[[PagePool, Tensor, Tensor, float], Tensor]

QUERY_BLOCK = 128
"""Queries of a block of the mask; an owner has one."""


def attend_with_flex(pool: PagePool, query: Tensor, positions: Tensor, scaling: float, compiled: bool = True) -> Tensor:
    """`attend_decode` by FlexAttention. compiled: with the kernel; False: as a dense computation with the same mask."""
    from torch.nn.attention.flex_attention import BlockMask

    owners, head_dim = positions.shape[0], query.shape[-1]
    count, table = pool.tables_on_device(owners)
    owner, expiry = pool.owner, pool.buffers["expiry"].view(-1)
    bias = pool.buffers["bias"].view(-1) if "bias" in pool.buffers else None

    def seen(own: Tensor, head: Tensor, index: Tensor, slot: Tensor) -> Tensor:
        return (owner[slot // PAGE] == own) & (expiry[slot] > positions[own])

    def weighed(logit: Tensor, own: Tensor, head: Tensor, index: Tensor, slot: Tensor) -> Tensor:
        assert bias is not None
        return logit + bias[slot]

    mask = BlockMask.from_kv_blocks(
        count[:, None, None],
        table[:, None, None],
        BLOCK_SIZE=(QUERY_BLOCK, PAGE),
        mask_mod=seen,
        seq_lengths=(1, pool.pages * PAGE),
        compute_q_blocks=False,
    )
    output: Tensor = _kernel(compiled)(
        query.reshape(owners, -1, 1, head_dim),
        pool.buffers["keys"].view(1, 1, -1, head_dim),
        pool.buffers["values"].view(1, 1, -1, head_dim),
        score_mod=None if bias is None else weighed,
        block_mask=mask,
        scale=scaling,
        enable_gqa=True,
    )
    return output.view(query.shape)


@cache
def _kernel(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


class Checked:
    """A kernel that is used if it agrees with another the first time, and never where it fails."""

    def __init__(self, kernel: Attend, reference: Attend) -> None:
        self.kernel = kernel
        self.reference = reference
        self.agrees: bool | None = None

    def __call__(self, pool: PagePool, query: Tensor, positions: Tensor, scaling: float) -> Tensor:
        """The output of the kernel, or of the reference."""
        if self.agrees:
            return self.kernel(pool, query, positions, scaling)
        expected = self.reference(pool, query, positions, scaling)
        if self.agrees is None:
            reason = self._difference(expected, pool, query, positions, scaling)
            self.agrees = reason is None
            if reason is not None:
                warnings.warn(f"FlexAttention over pages is not used on {query.device}: {reason}.", stacklevel=2)
        return expected

    def _difference(
        self, expected: Tensor, pool: PagePool, query: Tensor, positions: Tensor, scaling: float
    ) -> str | None:
        try:
            output = self.kernel(pool, query, positions, scaling)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"it does not run ({type(error).__name__})"
        largest = float((output.double() - expected.double()).abs().max())
        allowed = 32 * torch.finfo(query.dtype).eps * float(pool.buffers["values"].abs().max())
        return None if largest <= allowed else f"it differs by {largest:.2g}"


_by_flex_attention = Checked(attend_with_flex, by_page)
