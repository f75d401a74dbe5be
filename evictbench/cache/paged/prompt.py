"""A prompt that lies plain until its end: one row of one layer, in the order of positions.

All heads hold equally many entries, so that nothing here goes head by head. Pages begin at the prompt's end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from evictbench.cache.buffers import storage_bytes
from evictbench.cache.kernels import probabilities
from evictbench.cache.selection import in_slot_order
from evictbench.cache.softmax import Softmax

if TYPE_CHECKING:
    from evictbench.cache.buffers import ByteCounter
    from evictbench.cache.paged.centroids import Means


QUERIES_AT_ONCE = 512
"""Queries that attend together under a mask, which has a number for each of them and each slot."""


class Prompt:
    """The entries of one row in one layer.

    buffers: `[kv_heads, capacity, ...]` by name: "keys", "values", "positions", "expiry" (the first query position that
    may not see an entry) and the policy's slot tensors. The first `length` slots are filled.
    mass: `[kv_heads, length]`, the softmax of the prompt's last query over all of them, mean over a head's group.
    places: `[kv_heads]` int64, what each head has beside protected entries, once that is divided.
    means: the centroids of what has been dropped.
    """

    def __init__(self, bytes: ByteCounter) -> None:
        self._bytes = bytes
        self.buffers: dict[str, Tensor] = {}
        self.length = 0
        self.mass: Tensor | None = None
        self.places: Tensor | None = None
        self.means: Means | None = None

    def nbytes(self) -> int:
        """Bytes of its storages."""
        return storage_bytes(*self.buffers.values(), *(self.means or ()))

    def free(self) -> None:
        """Give everything up."""
        self._bytes.add(-self.nbytes())
        self.buffers, self.means = {}, None

    def set_means(self, means: Means) -> None:
        """Hold these centroids; as many as before, if there were some."""
        before = self.nbytes()
        self.means = means
        self._bytes.add(self.nbytes() - before)

    def held(self, name: str) -> Tensor:
        """The filled part of a buffer."""
        return self.buffers[name][:, : self.length]

    def append(self, entries: Mapping[str, Tensor], capacity: int) -> None:
        """Put new entries `[kv_heads, new, ...]` behind the others. capacity: slots to make if there are too few."""
        new = entries["positions"].shape[1]
        wanted = self.length + new
        for name, entry in entries.items():
            old = self.buffers.get(name)
            if old is None or old.shape[1] < wanted:
                made = entry.new_empty((entry.shape[0], max(capacity, wanted), *entry.shape[2:]))
                self._bytes.add(storage_bytes(made))
                if old is not None:
                    made[:, : self.length] = old[:, : self.length]
                    self._bytes.add(-storage_bytes(old))
                self.buffers[name] = made
            self.buffers[name][:, self.length : wanted] = entry
        self.length = wanted

    def keep(self, index: Tensor) -> None:
        """Keep only the slots `index` `[kv_heads, kept]`, ascending, moved to the front."""
        kept = index.shape[1]
        for name in self.buffers:
            self.buffers[name][:, :kept] = select(self.held(name), index)
        self.length = kept

    def visible(self, query: int, count: int) -> Tensor | None:
        """The slots of the `count` entries that a query at this position sees, `[kv_heads, count]`; None: all slots."""
        return None if count == self.length else in_slot_order(self.held("expiry") > query, count)


def select(buffer: Tensor, index: Tensor | None) -> Tensor:
    """The slots `index` `[kv_heads, some]` of a buffer `[kv_heads, slots, ...]`; None: all."""
    if index is None:
        return buffer
    if buffer.dim() == 3:
        index = index[:, :, None].expand(-1, -1, buffer.shape[2])
    return buffer.gather(1, index)


def attend_prompt(
    prompt: Prompt, index: Tensor | None, query: Tensor, first: int, scaling: float, expires: bool
) -> Tensor:
    """Attention of a row's new tokens over what they see, `[heads, new, head_dim]`, like query.

    index: `[kv_heads, slots]`, the slots that any of them may see, the new ones last; None: all. first: the position of
    the first new token. expires: some entry is seen by the first new token and not by the last.
    """
    keys, values = select(prompt.held("keys"), index), select(prompt.held("values"), index)
    kv_heads, slots, _ = keys.shape
    new = query.shape[1]
    # The KV heads are the batch, so that one mask serves all queries of a group.
    grouped = query.unflatten(0, (kv_heads, -1))
    keys, values = (part[:, None].expand(-1, grouped.shape[1], -1, -1) for part in (keys, values))
    if not expires and slots == new:
        output = F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scaling)
        return output.flatten(0, 1)
    expiry = select(prompt.held("expiry"), index)[:, None, None] if expires else None
    output = torch.empty_like(grouped)
    for start in range(0, new, QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, new)
        until = slots - new + stop
        mask = torch.ones((stop - start, until), dtype=torch.bool, device=query.device).tril(until - (stop - start))
        mask = mask[None, None]
        if expiry is not None:
            at = torch.arange(first + start, first + stop, dtype=torch.int32, device=query.device)
            mask = mask & (expiry[..., :until] > at[:, None])
        part = grouped[:, :, start:stop], keys[:, :, :until], values[:, :, :until]
        output[:, :, start:stop] = F.scaled_dot_product_attention(*part, attn_mask=mask, scale=scaling)
    return output.flatten(0, 1)


def last_mass(prompt: Prompt, query: Tensor, scaling: float) -> Tensor:
    """The softmax of one query `[heads, 1, head_dim]` over all entries, mean over the query heads of a KV head:
    `[kv_heads, slots]`, float32 or wider."""
    return probabilities(query[None], prompt.held("keys")[None], None, Softmax(scaling))[0, :, :, 0].mean(1)
