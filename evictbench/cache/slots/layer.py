"""One layer's slots: keys, values and the policy's slot tensors, and how they are written, moved and freed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from evictbench.policy.step import Entering

if TYPE_CHECKING:
    from evictbench.cache.forward_plan import Pass
    from evictbench.cache.slots.cache import EvictionCache


class SlotLayer(CacheLayerMixin):
    """The slots of one layer.

    buffers: "keys" and "values" `[rows, kv_heads, capacity, head_dim]` as cached (rotated, un-repeated), and the
    policy's slot tensors. ring: the last window queries `[rows, heads, window, head_dim]`, where a policy asks.
    memory: the policy's sequence tensors `[rows, kv_heads, ...]`.
    """

    is_sliding = False

    def __init__(self, cache: EvictionCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache
        self.index = index
        self.buffers: dict[str, Tensor] = {}
        self.ring: Tensor | None = None
        self.memory: dict[str, Tensor] = {}
        self.awaits_attention = False

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.buffers["keys"].shape[2] if self.buffers else 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new keys on to the attention function, with the way back to this layer on them."""
        if self.awaits_attention or (self.index and self.cache.layers[self.index - 1].awaits_attention):
            raise RuntimeError(
                "An EvictionCache was given to a model that does not attend through it; call "
                "model.set_attn_implementation('evictbench') and keep it while the cache is in use."
            )
        self.awaits_attention = True
        keys = key_states.view_as(key_states)
        keys.slots = self  # type: ignore[attr-defined]
        return keys, value_states

    def resize(self, rows: int, capacity: int, like: Tensor) -> None:
        """Make buffers of this size, keeping what fits. `like`: keys, for device and dtype."""
        shape = self.cache.shape
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype, float]] = {
            "keys": ((shape.head_dim,), like.dtype, 0.0),
            "values": ((shape.head_dim,), like.dtype, 0.0),
        }
        for name, tensor in self.cache.slot_tensors.items():
            if tensor.while_dense and not self.cache.reads_dense:
                continue
            wanted[name] = ((tensor.width,) if tensor.width else (), tensor.dtype, tensor.fill)
        for name, (tail, dtype, fill) in wanted.items():
            new = torch.full((rows, shape.kv_heads, capacity, *tail), fill, dtype=dtype, device=like.device)
            if (old := self.buffers.get(name)) is not None:
                keep_rows, keep = min(rows, old.shape[0]), min(capacity, old.shape[2])
                new[:keep_rows, :, :keep] = old[:keep_rows, :, :keep]
            self._replace(name, new)
        if not self.memory:
            for name, state in self.cache.memory_tensors.items():
                self._remember(name, like.new_full((0, shape.kv_heads, *state.size), 0, dtype=state.dtype))
        for name, old_memory in self.memory.items():
            state = self.cache.memory_tensors[name]
            if rows != old_memory.shape[0]:
                memory = old_memory.new_full((rows, *old_memory.shape[1:]), state.fill)
                memory[: min(rows, old_memory.shape[0])] = old_memory[:rows]
                self._remember(name, memory)

    def write(self, entering: Entering, step: Pass, free: Tensor) -> None:
        """Put a pass's new entries into their slots; slot tensors take their first values.

        free: the slot that a single new token takes, `[rows, sets]`.
        """
        step.put(self.buffers["keys"], entering.keys, free)
        step.put(self.buffers["values"], entering.values, free)
        if self.cache.slot_tensors:
            entered = self.cache.policy.enter(entering)
            for name, tensor in self.cache.slot_tensors.items():
                if name in self.buffers:
                    step.put(self.buffers[name], entered.get(name, tensor.fill), free)

    def remember_queries(self, queries: Tensor, window: int) -> None:
        """Keep the last `window` queries of each row, newest last; queries `[rows, heads, queries, head_dim]`."""
        rows, heads, new, head_dim = queries.shape
        if self.ring is None:
            self.ring = queries.new_zeros((max(rows, self.buffers["keys"].shape[0]), heads, window, head_dim))
            self.cache.count_bytes(self.ring.untyped_storage().nbytes())
        ring = self.ring[:rows]
        if new < window:
            ring.copy_(ring.roll(-new, dims=2))
            ring[:, :, window - new :] = queries
        else:
            ring.copy_(queries[:, :, new - window :])

    def forget_prompt(self) -> None:
        """Free what only a prompt needs: slot tensors held `while_dense`, and the ring where decode asks for none."""
        for name, tensor in self.cache.slot_tensors.items():
            if tensor.while_dense and name in self.buffers:
                self.cache.count_bytes(-self.buffers.pop(name).untyped_storage().nbytes())
        if self.ring is not None and not self.cache.policy.guarded:
            self.cache.count_bytes(-self.ring.untyped_storage().nbytes())
            self.ring = None

    def compact(self, group: list[int] | None, index: Tensor, capacity: int | None) -> None:
        """Keep the slots `index` `[rows, sets, kept]` of a group of rows, moved to the front.

        group: row numbers; None: the first rows, as many as index has. capacity: make new buffers of so many slots
        and free the old ones (only with all rows at once); None: move in place.
        """
        rows = slice(0, index.shape[0]) if group is None else torch.tensor(group, device=index.device)
        kept_slots = index.shape[2]
        for name, old in self.buffers.items():
            taken = old[rows]
            at = index.expand(-1, taken.shape[1], -1)
            if taken.dim() == 4:
                at = at[..., None].expand(-1, -1, -1, taken.shape[3])
            kept = taken.gather(2, at)
            if capacity is None:
                old[rows, :, :kept_slots] = kept
            else:
                new = old.new_zeros((old.shape[0], old.shape[1], capacity, *old.shape[3:]))
                new[rows, :, :kept_slots] = kept
                self._replace(name, new)

    def close_holes(self, free: Tensor, held: Tensor) -> None:
        """Move the entry of slot `held` `[rows]` into the slot `free` `[rows, sets]`, where those differ."""
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
        if source.ring is not None:
            if self.ring is None:
                self.ring = source.ring.new_zeros((self.buffers["keys"].shape[0], *source.ring.shape[1:]))
            self.ring[row] = source.ring[source_row]

    def forget(self) -> None:
        """Free everything."""
        self.buffers = {}
        self.memory = {}
        self.ring = None
        self.awaits_attention = False

    def nbytes(self) -> int:
        """Bytes of every storage this layer holds."""
        held = sum(tensor.untyped_storage().nbytes() for tensor in (*self.buffers.values(), *self.memory.values()))
        return held + (0 if self.ring is None else self.ring.untyped_storage().nbytes())

    def _replace(self, name: str, new: Tensor) -> None:
        old = self.buffers.get(name)
        self.cache.count_bytes(new.untyped_storage().nbytes())
        self.buffers[name] = new
        self.cache.count_bytes(-(0 if old is None else old.untyped_storage().nbytes()))

    def _remember(self, name: str, new: Tensor) -> None:
        old = self.memory.get(name)
        self.memory[name] = new
        held = 0 if old is None else old.untyped_storage().nbytes()
        self.cache.count_bytes(new.untyped_storage().nbytes() - held)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: slots are made when the first pass begins."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """What transformers would size a mask by; ours only says which new tokens are real."""
        return self.cache.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen, not kept."""
        return self.cache.columns

    def get_max_length(self) -> int:
        """No maximum: what does not fit is evicted."""
        return -1
