"""A prompt whose entries will compete: one row of one layer, held plain until its end, in the order of positions.

Every head holds equally much, so that nothing here goes head by head. Pages begin at the prompt's end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from evictbench.cache.kernels import probabilities
from evictbench.cache.selection import in_slot_order


class Prompt:
    """What one row has in one layer.

    buffers: by name, `[kv_heads, capacity, ...]`: "keys", "values", "positions", "deadlines" (the first query position
    that may not see an entry) and what the policy judges by; the first `length` slots are filled.
    mass: `[kv_heads, length]`, the softmax of the prompt's last query over all of them, mean over a head's group.
    means: keys and values `[kv_heads, means, head_dim]` and counts `[kv_heads, means]` of what has been dropped.
    """

    def __init__(self, count_bytes: Callable[[int], None]) -> None:
        self._count_bytes = count_bytes
        self.buffers: dict[str, Tensor] = {}
        self.length = 0
        self.mass: Tensor | None = None
        self.means: tuple[Tensor, Tensor, Tensor] | None = None

    def nbytes(self) -> int:
        """Bytes of its storages."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.buffers.values(), *(self.means or ())))

    def free(self) -> None:
        """Give everything up."""
        self._count_bytes(-self.nbytes())
        self.buffers, self.means = {}, None

    def set_means(self, means: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep means; the same number as before, if there were some."""
        before = self.nbytes()
        self.means = means
        self._count_bytes(self.nbytes() - before)

    def held(self, name: str) -> Tensor:
        """The filled part of a buffer."""
        return self.buffers[name][:, : self.length]

    def append(self, entries: Mapping[str, Tensor], capacity: int) -> None:
        """Put new entries `[kv_heads, new, ...]` behind the others; capacity: slots to make where there are too few."""
        new = entries["positions"].shape[1]
        wanted = self.length + new
        for name, entry in entries.items():
            old = self.buffers.get(name)
            if old is None or old.shape[1] < wanted:
                made = entry.new_empty((entry.shape[0], max(capacity, wanted), *entry.shape[2:]))
                self._count_bytes(made.untyped_storage().nbytes())
                if old is not None:
                    made[:, : self.length] = old[:, : self.length]
                    self._count_bytes(-old.untyped_storage().nbytes())
                self.buffers[name] = made
            self.buffers[name][:, self.length : wanted] = entry
        self.length = wanted

    def keep(self, index: Tensor) -> None:
        """Keep only the slots `index` `[kv_heads, kept]`, ascending, moved to the front."""
        kept = index.shape[1]
        for name in self.buffers:
            self.buffers[name][:, :kept] = taken(self.held(name), index)
        self.length = kept

    def seen(self, query: int, count: int) -> Tensor | None:
        """The slots of the `count` entries that a query at this position may see, `[kv_heads, count]`; None: all."""
        return None if count == self.length else in_slot_order(self.held("deadlines") > query, count)


def taken(buffer: Tensor, index: Tensor | None) -> Tensor:
    """The slots `index` `[kv_heads, some]` of a buffer `[kv_heads, slots, ...]`; None: all."""
    if index is None:
        return buffer
    if buffer.dim() == 3:
        index = index[:, :, None].expand(-1, -1, buffer.shape[2])
    return buffer.gather(1, index)


def attend_prompt(
    prompt: Prompt, index: Tensor | None, query: Tensor, first: int, scaling: float, dies: bool
) -> Tensor:
    """The new tokens of a row over what they may see: `[heads, new, head_dim]`, like query.

    index: the slots that any of them may see, the new ones last; first: the position of the first; dies: whether an
    entry is lost on the way from the first to the last of them.
    """
    keys, values = taken(prompt.held("keys"), index), taken(prompt.held("values"), index)
    kv_heads, slots, _ = keys.shape
    new = query.shape[1]
    # The KV heads are the batch, so that one mask serves all queries of a group.
    grouped = query.unflatten(0, (kv_heads, -1))
    keys, values = (part[:, None].expand(-1, grouped.shape[1], -1, -1) for part in (keys, values))
    if not dies and slots == new:
        output = F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scaling)
        return output.flatten(0, 1)
    causal = torch.ones((new, slots), dtype=torch.bool, device=query.device).tril(slots - new)
    mask = causal[None, None]
    if dies:
        at = torch.arange(first, first + new, dtype=torch.int32, device=query.device)
        mask = mask & (taken(prompt.held("deadlines"), index)[:, None, None] > at[:, None])
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return output.flatten(0, 1)


def last_mass(prompt: Prompt, query: Tensor, scaling: float) -> Tensor:
    """The softmax of one query `[heads, 1, head_dim]` over all that is held, mean over each group: `[kv_heads, slots]`
    float32 or wider."""
    return probabilities(query[None], prompt.held("keys")[None], None, scaling)[0, :, :, 0].mean(1)
