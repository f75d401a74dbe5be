"""Cache layers that no policy sees: what a model's other layers hold beside those that evict.

A window or chunk holds the last tokens that its next query can see. A state is transformers' own. Both move with the
rows of the cache that they belong to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DummyLayer, LinearAttentionLayer

from evictbench.cache.attention import Unsupported
from evictbench.cache.buffers import GROWTH_BLOCK, storage_bytes
from evictbench.cache.kernels import attend_and_observe
from evictbench.cache.layers import CacheLayer, FixedLayer, LayeredCache

if TYPE_CHECKING:
    from evictbench.cache.forward_plan import ForwardPlan
    from evictbench.cache.softmax import Softmax
    from evictbench.policy.layer_kinds import LayerKind

QUERIES_AT_ONCE = 512
"""Queries of a long chunk that attend together: each sees a window of keys, and no mask spans the text."""


class WindowLayer(CacheLayer):
    """The keys and values that the next query of a windowed or chunked layer can see.

    keys, values: `[rows, kv_heads, capacity, head_dim]`. The entry at position p lies in slot p % size, so that a new
    token takes the slot of the one that it pushes out, and what is held follows from the number of tokens seen.
    """

    is_sliding = True

    def __init__(self, cache: LayeredCache, kind: LayerKind) -> None:
        super().__init__(cache)
        assert kind.size is not None
        self.size = kind.size
        self.window = kind.size
        self.chunked = kind.holds == "chunk"

    def attend_in(self, plan: ForwardPlan, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Attention of the new tokens over the window of each, and the new entries in their slots."""
        if plan.single:
            self._write_one(plan, keys, values)
            return self._attend_one(plan, query, softmax)
        output = self._attend_chunk(plan, query, keys, values, softmax)
        self._write_chunk(plan, keys, values)
        return output

    # One new token a row.

    def _write_one(self, plan: ForwardPlan, keys: Tensor, values: Tensor) -> None:
        self._reserve(max(plan.seen), plan.rows, keys, values)
        assert self.keys is not None
        assert self.values is not None
        device = keys.device
        if len(set(plan.seen)) == 1:
            slot = (plan.seen[0] - 1) % self.size
            self.keys[: plan.rows, :, slot] = keys[:, :, 0]
            self.values[: plan.rows, :, slot] = values[:, :, 0]
            return
        slots = plan.once(f"window slots {self.size}", device, lambda: (_seen(plan, device) - 1) % self.size)
        rows = plan.once("rows", device, lambda: torch.arange(plan.rows, device=device))
        self.keys[rows, :, slots] = keys[:, :, 0]
        self.values[rows, :, slots] = values[:, :, 0]

    def _attend_one(self, plan: ForwardPlan, query: Tensor, softmax: Softmax) -> Tensor:
        assert self.keys is not None
        assert self.values is not None
        device, used = query.device, min(self.size, max(plan.seen))
        keys, values = self.keys[: plan.rows, :, :used], self.values[: plan.rows, :, :used]

        def hidden() -> Tensor:
            """0 where a slot holds an entry that the query sees, `[rows, 1, 1, used]`."""
            slots, seen = torch.arange(used, device=device), _seen(plan, device)[:, None]
            # The block of tokens that a chunked query lies in fills the slots from the front.
            visible = slots <= (seen - 1) % self.size if self.chunked else slots < seen
            return _additive(visible[:, None, None], query.dtype)

        full = min(plan.seen) >= self.size and not self.chunked
        level = not self.chunked and min(plan.seen) == max(plan.seen)
        name = f"window bias {self.size} {self.chunked}"
        bias = None if full or level else plan.once(name, device, hidden)
        return _attend(query, keys, values, bias, softmax)

    # Several new tokens a row.

    def _attend_chunk(self, plan: ForwardPlan, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        before = [seen - count for seen, count in zip(plan.seen, plan.counts, strict=True)]
        held = min(self.size - 1, max(before)) if self.size > 1 else 0
        if held == 0 and plan.queries <= self.size and plan.real is None:
            return _attend(query, keys, values, None, softmax, causal=True)
        if held:
            keys, values = (
                torch.cat([self._last(before, held, self.keys), keys], 2),
                torch.cat([self._last(before, held, self.values), values], 2),
            )
        parts = []
        for first in range(0, plan.queries, QUERIES_AT_ONCE):
            end = min(plan.queries, first + QUERIES_AT_ONCE)
            begin = max(0, held + first - self.size + 1)
            bias = self._chunk_bias(plan, before, held, begin, first, end, query.device, query.dtype)
            seen = slice(begin, held + end)
            parts.append(_attend(query[:, :, first:end], keys[:, :, seen], values[:, :, seen], bias, softmax))
        return torch.cat(parts, 2)

    def _chunk_bias(
        self,
        plan: ForwardPlan,
        before: list[int],
        held: int,
        begin: int,
        first: int,
        end: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """0 where queries `first` to `end` of the pass see the columns from `begin` on; columns stand in the order of
        the text, the `held` last tokens before the pass first: `[rows, 1, queries, columns]`."""

        def make() -> Tensor:
            columns = torch.arange(begin, held + end, device=device)
            queries = held + torch.arange(first, end, device=device)
            start = torch.tensor(list(before), device=device)[:, None]
            padding = plan.queries - torch.tensor(plan.counts, device=device)[:, None]
            # The position of a column, in a row whose padding comes before its first token.
            position = torch.where(columns >= held, start + columns - held - padding, start + columns - held)
            exists = (position >= 0) & ((columns < held) | (columns - held >= padding))
            of_queries = start + queries - held - padding
            visible = exists[:, None] & (columns <= queries[:, None])
            if self.chunked:
                visible &= position[:, None] // self.size == (of_queries // self.size)[:, :, None]
            else:
                visible &= columns > queries[:, None] - self.size
            visible |= columns == queries[:, None]  # padding sees itself, so that no softmax is empty
            return _additive(visible[:, None], dtype)

        return plan.once(f"window bias {self.size} {self.chunked} {first}", device, make)

    def _last(self, before: list[int], count: int, buffer: Tensor | None) -> Tensor:
        """The last `count` entries of each row in the order of the text; anything where a row has fewer."""
        assert buffer is not None
        seen = torch.tensor(before, device=buffer.device)[:, None]
        slots = (seen - count + torch.arange(count, device=buffer.device)) % self.size
        slots = slots.clamp(max=buffer.shape[2] - 1)
        return buffer[: len(before)].gather(2, slots[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3]))

    def _write_chunk(self, plan: ForwardPlan, keys: Tensor, values: Tensor) -> None:
        """Fill each slot with the last of the new tokens that belongs there, or leave what it holds."""
        self._reserve(max(plan.seen), plan.rows, keys, values)
        assert self.keys is not None
        assert self.values is not None
        device, used = keys.device, min(self.size, max(plan.seen))

        def sources() -> Tensor:
            """The new token that each slot takes, below 0 for none: `[rows, used]`."""
            last = _seen(plan, device)[:, None] - 1
            position = last - (last - torch.arange(used, device=device)) % self.size
            first = last + 1 - torch.tensor(plan.counts, device=device)[:, None]
            return torch.where(position >= first, plan.queries - 1 - (last - position), -1)

        source = plan.once(f"window sources {self.size}", device, sources)
        taken = (source >= 0)[:, None, :, None]
        index = source.clamp(min=0)[:, None, :, None]
        for buffer, new in ((self.keys, keys), (self.values, values)):
            part = buffer[: plan.rows, :, :used]
            part.copy_(torch.where(taken, new.gather(2, index.expand(-1, new.shape[1], -1, new.shape[3])), part))

    # What is held.

    def _reserve(self, tokens: int, rows: int, keys: Tensor, values: Tensor) -> None:
        rows = max(rows, self.cache.row_capacity or 0)
        capacity = min(self.size, -(-tokens // GROWTH_BLOCK) * GROWTH_BLOCK)
        if self.keys is not None and self.keys.shape[0] >= rows and self.keys.shape[2] >= capacity:
            return
        grown = []
        for old, like in ((self.keys, keys), (self.values, values)):
            new = like.new_zeros((rows, like.shape[1], capacity, like.shape[3]))
            if old is not None:
                new[: old.shape[0], :, : old.shape[2]] = old
            grown.append(new)
        change = storage_bytes(*grown) - self.nbytes()
        self.keys, self.values = grown
        self.bytes.add(change)

    def nbytes(self) -> int:
        """Bytes of every storage this layer holds."""
        return 0 if self.keys is None or self.values is None else storage_bytes(self.keys, self.values)

    def forget(self) -> None:
        """Free everything."""
        super().forget()
        self.keys = self.values = None

    def copy_row(self, source: WindowLayer, source_row: int, row: int) -> None:
        """Copy a row of another cache's layer, or of this one."""
        assert source.keys is not None
        assert source.values is not None
        self._reserve(source.keys.shape[2], row + 1, source.keys, source.values)
        assert self.keys is not None
        assert self.values is not None
        width = source.keys.shape[2]
        self.keys[row, :, :width] = source.keys[source_row]
        self.values[row, :, :width] = source.values[source_row]

    def drop_last_row(self) -> None:
        """The last row has ended: its room stays for the next one."""


class StateLayer(LinearAttentionLayer):
    """A recurrent or convolution state, as transformers keeps it, whose rows come and go."""

    def nbytes(self) -> int:
        """Bytes of every storage this layer holds."""
        return storage_bytes(*self._states())

    def forget(self) -> None:
        """Free everything."""
        self.__init__(self.number_of_states)  # type: ignore[misc]

    def copy_row(self, source: StateLayer, source_row: int, row: int) -> None:
        """Copy a row of another cache's layer, or of this one, into a row that exists or the next one."""
        for index in range(self.number_of_states):
            for states, theirs in (
                (self.conv_states, source.conv_states),
                (self.recurrent_states, source.recurrent_states),
            ):
                new = theirs[index]
                if new is None:
                    continue
                own, part = states[index], new[source_row : source_row + 1]
                if own is None:
                    states[index] = part.clone()
                elif row < own.shape[0]:
                    own[row] = part[0]
                else:
                    states[index] = torch.cat([own, part])
            self.is_conv_states_initialized[index] = self.conv_states[index] is not None
            self.is_recurrent_states_initialized[index] = self.recurrent_states[index] is not None
            self.has_previous_state[index] = source.has_previous_state[index]
            self.conv_kernel_size[index] = source.conv_kernel_size[index]
        self.dtype, self.device = source.dtype, source.device

    def drop_last_row(self) -> None:
        """The last row has ended: its state is freed."""
        for states in (self.conv_states, self.recurrent_states):
            for index, own in states.items():
                if own is not None:
                    states[index] = own[:-1].clone()

    def _states(self) -> list[Tensor]:
        return [
            own for states in (self.conv_states, self.recurrent_states) for own in states.values() if own is not None
        ]


class StatefulLayer(StateLayer):
    """A layer that attends through the cache and has a state besides. attending: the part that attends."""

    def __init__(self, number_of_states: int, attending: CacheLayer) -> None:
        super().__init__(number_of_states)
        self.attending = attending
        self.is_sliding = attending.is_sliding

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand new keys and values to the part that attends."""
        return self.attending.update(*args, **kwargs)

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.attending.get_seq_length()

    def forget(self) -> None:
        """Free everything."""
        self.__init__(self.number_of_states, self.attending)  # type: ignore[misc]


class EmptyLayer(DummyLayer):
    """A layer without attention."""

    def nbytes(self) -> int:
        """Nothing is held."""
        return 0

    def forget(self) -> None:
        """Nothing is held."""

    def copy_row(self, source: Any, source_row: int, row: int) -> None:
        """Nothing is held."""

    def drop_last_row(self) -> None:
        """Nothing is held."""


def number_of_states(config: Any) -> int:
    """States of a layer that holds any. config: the model's."""
    return int(getattr(config.get_text_config(decoder=True), "number_of_conv_states", 1))


def fixed_layer(cache: LayeredCache, kind: LayerKind, config: Any) -> FixedLayer:
    """An empty layer of a kind that does not evict. config: the model's."""
    if kind.holds in ("window", "chunk"):
        return WindowLayer(cache, kind)
    if kind.holds == "state":
        return StateLayer(number_of_states(config))
    if kind.holds == "nothing":
        return EmptyLayer()  # type: ignore[no-untyped-call]
    raise Unsupported(f"it has layers of the kind `{kind.name}`")


def _seen(plan: ForwardPlan, device: torch.device) -> Tensor:
    """Tokens of each row after this pass: `[rows]` int64."""
    return plan.once("seen", device, lambda: torch.tensor(plan.seen, device=device))


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, softmax: Softmax, causal: bool = False
) -> Tensor:
    """Attention under a bias, or without one over all keys, or those up to each query's own."""
    if softmax.plain:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=bias, is_causal=causal, scale=softmax.scaling, enable_gqa=True
        )
    first = None if bias is not None else 0 if causal else keys.shape[2] - 1
    return attend_and_observe(query, keys, values, bias, softmax, causal_from=first, observe=False)[0]
