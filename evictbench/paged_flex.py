"""Decode from pages by FlexAttention, for CUDA: one kernel that walks each owner's pages.

Every owner (a KV head of a row) is a sequence of the batch, whose one block of queries is its group's; the pool is the
keys that all share, a page a block, and the block mask lists each owner's pages. What the kernel gives is checked once
in a process against the batched form of `paged_attention`, which is used instead where it does not compile or differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from evictbench.pages import PAGE, PagePool

Attend = Callable[[PagePool, Tensor, Tensor, float], Tensor]

QUERY_BLOCK = 128
"""Queries of a block of the mask; an owner has one."""


def attend_one(pool: PagePool, query: Tensor, positions: Tensor, scaling: float, compiled: bool = True) -> Tensor:
    """As `paged_attention.attend_one`. compiled: by the kernel; else as a dense computation with the same mask."""
    from torch.nn.attention.flex_attention import BlockMask

    owners, head_dim = positions.shape[0], query.shape[-1]
    count, table = pool.tables_on_device(owners)
    owner, deadlines = pool.owner, pool.buffers["deadlines"].view(-1)
    bias = pool.buffers["bias"].view(-1) if "bias" in pool.buffers else None

    def seen(own: Tensor, head: Tensor, index: Tensor, slot: Tensor) -> Tensor:
        return (owner[slot // PAGE] == own) & (deadlines[slot] > positions[own])

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
            found = self.kernel(pool, query, positions, scaling)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"it does not run ({type(error).__name__})"
        largest = float((found.double() - expected.double()).abs().max())
        allowed = 32 * torch.finfo(query.dtype).eps * float(pool.buffers["values"].abs().max())
        return None if largest <= allowed else f"it differs by {largest:.2g}"
