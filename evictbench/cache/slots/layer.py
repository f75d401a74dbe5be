"""One layer's slots: keys, values and the policy's slot tensors, and how they are written, moved and freed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.base import KVCache
from evictbench.cache.buffers import counted, storage_bytes
from evictbench.cache.layers import EvictingLayer

if TYPE_CHECKING:
    from evictbench.cache.forward_plan import ForwardPlan
    from evictbench.policy.base import Policy
    from evictbench.policy.step import NewEntries


class SlotLayer(EvictingLayer):
    """The slots of one layer.

    buffers: "keys" and "values" `[rows, kv_heads, capacity, head_dim]` as cached (rotated, not repeated for grouped
    queries), and the policy's slot tensors by name. last_queries: `[rows, heads, window, head_dim]`, if a policy asks
    for `window_probs`. memory: the policy's sequence tensors `[rows, kv_heads, *size]` by name.
    """

    def __init__(self, cache: KVCache, policy: Policy, index: int) -> None:
        super().__init__(cache, index)
        self.shape = cache.shape
        self.slot_tensors = policy.slot_state(cache.shape)
        self.memory_tensors = policy.memory(cache.shape)
        self.buffers: dict[str, Tensor] = {}
        self.last_queries: Tensor | None = None
        self.memory: dict[str, Tensor] = {}

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.buffers["keys"].shape[2] if self.buffers else 0

    def resize(self, rows: int, capacity: int, like: Tensor, dense: bool) -> None:
        """Make buffers of this size, keeping what fits.

        like: keys, for device and dtype. dense: a prompt is held whole and has not ended.
        """
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype, float]] = {
            "keys": ((self.shape.head_dim,), like.dtype, 0.0),
            "values": ((self.shape.value_dim or self.shape.head_dim,), like.dtype, 0.0),
        }
        for name, declared in self.slot_tensors.items():
            if dense or not declared.while_dense:
                wanted[name] = ((declared.width,) if declared.width else (), declared.dtype, declared.fill)
        for name, (tail, dtype, fill) in wanted.items():
            size = (rows, self.shape.kv_heads, capacity, *tail)
            new = counted(partial(torch.full, size, fill, dtype=dtype, device=like.device))
            if (old := self.buffers.get(name)) is not None:
                keep_rows, keep = min(rows, old.shape[0]), min(capacity, old.shape[2])
                new[:keep_rows, :, :keep] = old[:keep_rows, :, :keep]
            self._replace(self.buffers, name, new)
        for name, state in self.memory_tensors.items():
            old = self.memory.get(name)
            if old is None or rows != old.shape[0]:
                size = (rows, self.shape.kv_heads, *state.size)
                memory = torch.full(size, state.fill, dtype=state.dtype, device=like.device)
                if old is not None:
                    memory[: min(rows, old.shape[0])] = old[:rows]
                self._replace(self.memory, name, memory)

    def write(self, policy: Policy, entering: NewEntries, plan: ForwardPlan, free: Tensor) -> None:
        """Put a pass's new entries into their slots, with the first values of the policy's slot tensors.

        free: `[rows, sets]` int64, the slot that a single new token takes.
        """
        plan.put(self.buffers["keys"], entering.keys, free)
        plan.put(self.buffers["values"], entering.values, free)
        if self.slot_tensors:
            first_values = policy.enter(entering)
            for name, declared in self.slot_tensors.items():
                if name in self.buffers:
                    plan.put(self.buffers[name], first_values.get(name, declared.fill), free)

    def remember_queries(self, queries: Tensor, window: int) -> None:
        """Keep the last `window` queries of each row, newest last; queries: `[rows, heads, new, head_dim]`."""
        rows, heads, new, head_dim = queries.shape
        if self.last_queries is None:
            size = (max(rows, self.buffers["keys"].shape[0]), heads, window, head_dim)
            self.last_queries = queries.new_zeros(size)
            self.bytes.add(storage_bytes(self.last_queries))
        last = self.last_queries[:rows]
        if new < window:
            last.copy_(last.roll(-new, dims=2))
            last[:, :, window - new :] = queries
        else:
            last.copy_(queries[:, :, new - window :])

    def end_prompt(self, keep_queries: bool) -> None:
        """Free what only a prompt needs: slot tensors held `while_dense`, and the last queries unless they are kept."""
        for name, declared in self.slot_tensors.items():
            if declared.while_dense and name in self.buffers:
                self.bytes.add(-storage_bytes(self.buffers.pop(name)))
        if self.last_queries is not None and not keep_queries:
            self.bytes.add(-storage_bytes(self.last_queries))
            self.last_queries = None

    def compact(self, group: list[int] | None, index: Tensor, capacity: int | None) -> None:
        """Keep the slots `index` `[rows, sets, kept]` of a group of rows, moved to the front.

        group: row numbers; None: the first rows, as many as index has. capacity: make new buffers of so many slots
        and free the old ones (only with all rows at once); None: move in place.
        """
        rows = slice(0, index.shape[0]) if group is None else torch.tensor(group, device=index.device)
        kept_slots = index.shape[2]
        for name, old in self.buffers.items():
            of_rows = old[rows]
            at = index.expand(-1, of_rows.shape[1], -1)
            if of_rows.dim() == 4:
                at = at[..., None].expand(-1, -1, -1, of_rows.shape[3])
            kept = of_rows.gather(2, at)
            if capacity is None:
                old[rows, :, :kept_slots] = kept
            else:
                size = (old.shape[0], old.shape[1], capacity, *old.shape[3:])
                new = counted(partial(torch.zeros, size, dtype=old.dtype, device=old.device))
                new[rows, :, :kept_slots] = kept
                self._replace(self.buffers, name, new)

    def fill_freed_slots(self, free: Tensor, held: Tensor) -> None:
        """Move the entry in slot `held` `[rows]` into the slot `free` `[rows, sets]`, where those differ."""
        rows = held.shape[0]
        for buffer in self.buffers.values():
            source = held.view(rows, 1, 1).expand(rows, buffer.shape[1], 1)
            target = free[:, :, None].expand(rows, buffer.shape[1], 1)
            if buffer.dim() == 4:
                source = source[..., None].expand(-1, -1, -1, buffer.shape[3])
                target = target[..., None].expand(-1, -1, -1, buffer.shape[3])
            buffer[:rows].scatter_(2, target, buffer[:rows].gather(2, source))

    def copy_row(self, source: SlotLayer, source_row: int, row: int, slots: int) -> None:
        """Copy the first `slots` of another layer's row into this one's."""
        for name, buffer in self.buffers.items():
            buffer[row, :, :slots] = source.buffers[name][source_row, :, :slots]
        for name, memory in self.memory.items():
            memory[row] = source.memory[name][source_row]
        if source.last_queries is not None:
            if self.last_queries is None:
                size = (self.buffers["keys"].shape[0], *source.last_queries.shape[1:])
                self.last_queries = source.last_queries.new_zeros(size)
            self.last_queries[row] = source.last_queries[source_row]

    def forget(self) -> None:
        """Free everything."""
        super().forget()
        self.buffers = {}
        self.memory = {}
        self.last_queries = None

    def nbytes(self) -> int:
        """Bytes of every storage this layer holds."""
        last_queries = () if self.last_queries is None else (self.last_queries,)
        return storage_bytes(*self.buffers.values(), *self.memory.values(), *last_queries)

    def _replace(self, tensors: dict[str, Tensor], name: str, new: Tensor) -> None:
        old = tensors.get(name)
        self.bytes.add(storage_bytes(new))
        tensors[name] = new
        if old is not None:
            self.bytes.add(-storage_bytes(old))
