"""ExpiryCache: entries that expire. Each has the first query position that may no longer see it.

A policy decides that when an entry comes, or one token later. An expired entry gives its slot to a new one: in decode
slot by slot, after a chunk by moving entries to the front of their pages. Expiries alone decide what is seen, so that
every chunk size gives the result of reading token by token. A prompt is never held whole: after each chunk a head holds
what the next query sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from evictbench.cache.clock import ATTENTION, POLICY, SIGNALS
from evictbench.cache.forward_plan import ForwardPlan
from evictbench.cache.paged.attention import attend_chunk, attend_decode
from evictbench.cache.paged.cache import PagedCache, at_row
from evictbench.cache.paged.layer import PagedLayer
from evictbench.cache.paged.pool import PagePool
from evictbench.cache.paged.stack import StackedPools
from evictbench.cache.softmax import Softmax
from evictbench.policy.ragged import RaggedPolicy
from evictbench.policy.step import Activation, NewEntries


@dataclass
class DecodePass:
    """A pass on one device in which each row decodes a token.

    stack: the device's pools. positions: `[owners]` int32, of the new entries. before: `[layers, owners]` int64, the
    numbers of the slots that were written last before the pass. slots, bias: by layer, the slots of the new entries
    `[owners]`, and the bias of `attend_decode` where it is made for all layers at once. entries: the new entries of the
    layers that have attended, with the activations as they came.
    """

    stack: StackedPools
    positions: Tensor
    before: Tensor
    slots: dict[int, Tensor]
    bias: dict[int, Tensor]
    entries: list[NewEntries] = field(default_factory=list)


class ExpiryCache(PagedCache):
    """The cache of a `RaggedPolicy`; arguments and errors as of `KVCache`.

    A budget is what the policy makes of it (`RaggedPolicy.allot`), for each row when its prompt begins. Nothing is cut
    to it. `prefill` changes nothing: a prompt is read in chunks that hold what the next query sees.

    In decode one operation serves all layers of a device: before the first layer it finds the slots of the new entries
    and what their queries see; after the last one the policy reads and decides, and visibility is updated.
    """

    policy: RaggedPolicy

    def reset(self) -> None:
        """Forget every sequence and free every page."""
        super().reset()
        self._decoding: dict[torch.device, DecodePass] = {}

    def new_pool(self, rows: int, like: Tensor) -> PagePool:
        """An empty pool with one owner for each row and KV head. like: a tensor of keys."""
        return PagePool(rows * self.shape.kv_heads, like, self.bytes)

    def held_entries(self, layer: int, row: int) -> list[tuple[Tensor, Tensor]]:
        """Positions and expiry of all entries that a row has in the layer's pages, by KV head."""
        pool = self.evicting[layer].pool
        assert pool is not None
        return [(pool.entries(owner, "positions"), pool.entries(owner, "expiry")) for owner in self.owners(row)]

    def read(self, layer: int, name: Activation, tensor: Tensor) -> Tensor:
        """Return the tensor to remember. In a decode step that is the activation: all layers are read at once, last."""
        one_token = tensor.shape[1] == 1 and self.columns > 0
        return tensor if one_token else self.policy.read(layer, name, tensor)

    def decodes_in_pages(self, plan: ForwardPlan) -> bool:
        """Whether each row has one new token, and entries before it."""
        return plan.single and self.columns > 0

    def begin_prompt(self, plan: ForwardPlan) -> None:
        """Set each row's threshold from its budget, once, when its prompt begins."""
        if self.columns == 0:
            for row in self.rows:
                row.threshold = self.policy.threshold(self.budget, row.prompt)

    def open_decode(self, plan: ForwardPlan, keys: Tensor) -> None:
        """Find the slots of the new entries in all layers, and the newest entries before them, which they decide on."""
        self._decoding = {}
        for device, pools in self.pools().items():
            stack = self.stack(pools.values())
            positions = plan.decode_positions(self.shape.kv_heads, device)
            before = stack.newest(positions.shape[0])
            slots, _ = stack.append(positions)
            bias: dict[int, Tensor] = {}
            if device.type != "cuda":
                bias = dict(zip(pools, stack.bias(positions, self.shape.group, keys.dtype), strict=True))
            by_layer = dict(zip(pools, slots.unbind(), strict=True))
            self._decoding[device] = DecodePass(stack, positions, before, by_layer, bias)

    def attend(
        self, layer: PagedLayer, plan: ForwardPlan, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax
    ) -> Tensor:
        """Attend in pages if each row has one new token, else chunk by chunk. The output is shaped like query."""
        scaling = self.plain_scaling(softmax)
        new = replace(
            self.new_entries(layer.index, plan, keys, values),
            activation=self.take_activation(layer.index, keys.device),
        )
        if self.decodes_in_pages(plan):
            return self._attend_decode(layer, query, new, scaling)
        return self._attend_chunk(layer, plan, query, new, scaling)

    def _attend_chunk(
        self, layer: PagedLayer, plan: ForwardPlan, query: Tensor, new: NewEntries, scaling: float
    ) -> Tensor:
        """A layer's attention in a chunk, row by row."""
        if layer.pool is None:
            layer.pool = self.new_pool(max(self.row_capacity or 0, plan.rows), new.keys)
        pool, positions = layer.pool, new.positions
        expiry = self.policy.expiry(new).to(torch.int32)
        self._decide_newest(pool, plan, expiry[:, :, 0])
        query = self.policy.after_rotation(query)
        output = torch.zeros_like(query)
        for row, count in enumerate(plan.counts):
            if count == 0:
                continue
            part = slice(plan.queries - count, plan.queries)
            entries = at_row({"keys": new.keys, "values": new.values, "expiry": expiry[:, :, 1:]}, row, part)
            entries["positions"] = positions[row, part].expand(self.shape.kv_heads, -1)
            first = self.owners(row).start
            self.clock.lap(POLICY, query.device)
            output[row, :, part] = attend_chunk(pool, first, query[row, :, part], entries, scaling)
            self.clock.lap(ATTENTION, query.device)
            pool.write_chunk(first, entries, plan.seen[row])
        return output

    def _decide_newest(self, pool: PagePool, plan: ForwardPlan, expiry: Tensor) -> None:
        """Write the expiry `[rows, kv_heads]` of each row's last entry before this pass."""
        rows = [row for row, count in enumerate(plan.counts) if count and self.rows[row].seen]
        if len(rows) == plan.rows:
            pool.set_newest_expiry(slice(0, expiry.numel()), expiry.flatten())
        elif rows:
            chosen = torch.tensor(rows, device=pool.device)
            pool.set_newest_expiry(self.owners_of(rows, pool.device), expiry[chosen].flatten())

    def _attend_decode(self, layer: PagedLayer, query: Tensor, new: NewEntries, scaling: float) -> Tensor:
        """A layer's attention in decode; after the last layer, the decisions of all."""
        decoding, pool = self._decoding[new.keys.device], layer.pool
        assert pool is not None
        decoding.entries.append(new)
        for name, entry in (("keys", new.keys), ("values", new.values)):
            pool.buffers[name].flatten(0, 1).index_copy_(0, decoding.slots[layer.index], entry.flatten(0, 2))
        query = self.policy.after_rotation(query)
        self.clock.lap(POLICY, query.device)
        output = attend_decode(pool, query, decoding.positions, scaling, decoding.bias.get(layer.index))
        self.clock.lap(ATTENTION, query.device)
        if layer.index == self.shape.layers - 1:
            self._decide()
        return output

    def _decide(self) -> None:
        """Let the policy decide about the entries before the new ones, and find what the next queries see."""
        for device, decoding in self._decoding.items():
            numbers, expiry = decoding.before, self._expiry_of_layers(device, decoding.entries)
            if not all(self.seen):  # before this token a row may have had none
                had_one = self.owners_of((index for index, row in enumerate(self.rows) if row.seen), device)
                numbers, expiry = numbers[:, had_one], expiry[:, had_one]
            decoding.stack.slots["expiry"].view(-1).index_copy_(0, numbers.flatten(), expiry.flatten())
            decoding.stack.update_visibility(decoding.positions + 1)
        self._decoding = {}

    def _expiry_of_layers(self, device: torch.device, entries: list[NewEntries]) -> Tensor:
        """The expiry of the entries before the new ones, `[layers, owners]` int32."""
        activations = [new.activation for new in entries if new.activation is not None]
        if activations:
            self.clock.lap(POLICY, device)
            (name,) = self.policy.hooks
            read = self.policy.read_layers([new.layer for new in entries], name, activations)
            entries = [replace(new, activation=own) for new, own in zip(entries, read.unbind(), strict=True)]
            self.clock.lap(SIGNALS, device)
        return self.policy.expiry_of_layers(entries)[..., 0].flatten(1).to(torch.int32)
