"""SlotCache: a KV cache of fixed slots, in which every kept set of a layer holds equally many entries.

In decode a full row overwrites the slot of the entry that was evicted last: nothing is moved and no shape changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evictbench.cache.base import KVCache
from evictbench.cache.buffers import GROWTH_BLOCK
from evictbench.cache.forward_plan import ForwardPlan
from evictbench.cache.rope import SinkShift, inverse_frequencies, rotations
from evictbench.cache.rows import Sequence
from evictbench.cache.slots.eviction import Eviction
from evictbench.cache.slots.layer import SlotLayer
from evictbench.cache.slots.placement import Placement
from evictbench.cache.slots.signals import LayerAttention, visibility
from evictbench.errors import UserError
from evictbench.policy.base import Policy
from evictbench.policy.step import NewEntries, Signals, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.softmax import Softmax
    from evictbench.policy.budget import Budget


class SlotCache(KVCache):
    """A KV cache of slots; arguments and errors as of `KVCache`.

    A decode query never sees more than its budget, where the policy enforces it. While `output_unread` is set,
    attention whose probabilities the policy does not read is not computed: a pass from a recording.
    """

    evicting: list[SlotLayer]
    policy: Policy
    output_unread = False

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        budget: Budget | int | str | None = None,
        **settings: Any,
    ) -> None:
        self.inv_freq = inverse_frequencies(model, policy.name) if policy.needs_rope else None
        self.rotations = rotations(model, policy.name) if policy.reindexed_sinks else None
        super().__init__(model, policy, budget, **settings)
        self.charge = policy.charge(self.shape)
        self.dense = self.budget is None or self.mode == "dense"

    def new_layer(self, index: int) -> SlotLayer:
        """A layer without entries."""
        return SlotLayer(self, self.policy, index)

    def reset(self) -> None:
        """Forget every sequence and free every slot."""
        super().reset()
        self.placements: list[Placement] = []
        self.eviction = Eviction(self.policy, self.evicting, self.placements, self.bytes)
        self.shift = None
        if self.rotations is not None:
            self.shift = SinkShift(self.rotations, self.policy.sinks)
        self._carried: dict[str, Any] = {}

    # What is held.

    def placement(self, layer: int) -> Placement:
        """The placement of a layer: its own, or the whole model's."""
        return self.placements[layer if len(self.placements) > 1 else 0]

    def allowance(self, row: Sequence, seen: int) -> int:
        """How many entries in slots a query may see that is the `seen`-th token of its row: the budget, less the state
        that is charged. Where a share of the budget is one of the cache, `seen` counts the entries that are held."""
        if self.budget is None:
            return seen + 1
        budget = self.budget.at(0 if self.policy.share_of == "cache" else row.prompt, seen)
        self.policy.check_entries(budget, self.shape)
        return self.charge.slots(budget)

    def kept(self, layer: int, row: int = 0) -> Tensor:
        """The positions that a layer holds of a row, ascending, `[sets, held]` int64; all sets hold equally many."""
        placement, held, freed = self.placement(layer), self.rows[row].held, self.rows[row].freed_slot
        positions = placement.positions[row, :, : held + freed].long().clone()
        if freed:
            positions.scatter_(1, placement.free[row, :, None], torch.iinfo(torch.int64).max)
        return positions.sort(-1).values[:, :held]

    def entries_held(self) -> tuple[Tensor | float, Tensor | float]:
        """Entries that a KV head holds, the most and the mean over rows."""
        held = [row.held for row in self.rows]
        return max(held), sum(held) / len(held)

    def evictable_bytes(self) -> int:
        """Bytes held in the layers that evict: keys, values, positions, the policy's state."""
        return (
            sum(layer.nbytes() for layer in self.evicting)
            + sum(placement.nbytes() for placement in self.placements)
            + (self.shift.nbytes() if self.shift is not None else 0)
        )

    def row_bytes(self, row: int) -> int:
        """Bytes of one row's part of what is held."""
        return self.nbytes() // (self.row_capacity or len(self.rows))

    # One forward pass.

    def check_rows(self, rows: int) -> None:
        """Raise UserError if the policy needs labels and a row has none."""
        if self.policy.needs_labels and (len(self.rows) != rows or any(row.labels is None for row in self.rows)):
            raise UserError(
                f"{self.policy.name} needs labels from a dense run over the same text, and this cache was given "
                "none: it works in evictbench's own runs and not in model.generate(...)."
            )

    def plan(self, queries: int, counts: list[int], real: Tensor | None, ends_prompt: bool) -> ForwardPlan:
        """Return the plan of the next pass, with the entries that each row has to lose."""
        phase = "decode" if self.prompt_done else "prompt"
        return ForwardPlan.make(
            self.rows,
            queries,
            counts,
            real,
            allowance=self.allowance,
            keep=lambda budget: self.policy.keep(budget, phase),  # type: ignore[arg-type]
            changes=self.budget is not None and self.budget.tokens is None,
            of_cache=self.policy.share_of == "cache",
            dense=self.dense,
            decodes=self.prompt_done,
            ends_prompt=ends_prompt,
        )

    def open(self, plan: ForwardPlan, keys: Tensor) -> None:
        """Make room for a pass, and rotate the sinks for it."""
        self._make_room(plan, keys)
        if not plan.single:
            self.compact()
        elif self.shift is not None and not plan.dense:
            held = [layer.buffers.get("keys") for layer in self.evicting]
            self.bytes.add(self.shift.begin(held, plan.sink_shifts()))

    def attend(
        self, layer: SlotLayer, plan: ForwardPlan, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax
    ) -> Tensor:
        """Write a layer's new entries, attend, show the policy its signals, and evict."""
        step = self._view(layer, plan, self._write(layer, plan, keys, values))
        if not self.eviction.prepares_last(plan):
            self.policy.prepare(step)
        expiry = self.eviction.expiry(plan, step)
        attention = LayerAttention(
            policy=self.policy,
            layer=layer,
            plan=plan,
            step=step,
            query=query,
            softmax=softmax,
            bias=visibility(plan, step, expiry, shared=len(self.placements) == 1),
            shift=self.shift,
            clock=self.clock,
            unread=self.output_unread,
        )
        output = attention.run()
        self.policy.observe(step)
        self.eviction.after_layer(plan, step)
        return output

    def _write(self, layer: SlotLayer, plan: ForwardPlan, keys: Tensor, values: Tensor) -> NewEntries:
        """Put a layer's new entries into their slots, behind sinks that are rotated for this pass."""
        placement = self.placement(layer.index)
        if not layer.buffers:
            layer.resize(placement.positions.shape[0], placement.capacity, keys, self.dense and not self.prompt_done)
        if len(self.placements) > 1:
            placement.move_to(keys.device)
        positions = plan.query_positions(keys.device)
        if layer.index == 0 or len(self.placements) > 1:
            plan.put(placement.positions, positions[:, None], placement.free)
            for name, tensor in placement.state.items():
                plan.put(tensor, placement.shared[name].fill, placement.free)
        if self.shift is not None and plan.single and (rotated := self.shift.rotated(layer.index)) is not None:
            layer.buffers["keys"][: plan.rows, :, : self.policy.sinks] = rotated
        entering = NewEntries(
            layer=layer.index,
            shape=self.shape,
            positions=positions,
            keys=keys,
            values=values,
            unrotate_angles=self._unrotate_angles(keys, plan),
            labels=self._labels(layer.index, positions),
        )
        layer.write(self.policy, entering, plan, placement.free.to(keys.device))
        return entering

    def _view(self, layer: SlotLayer, plan: ForwardPlan, entered: NewEntries) -> Step:
        """One layer as the policy sees it."""
        keys, placement = plan.in_use(layer.buffers["keys"]), self.placement(layer.index)
        shared = {name: plan.in_use(tensor) for name, tensor in placement.state.items()}
        shared |= {name: memory[: plan.rows] for name, memory in placement.memory.items()}
        buffers, free = layer.buffers, placement.free

        def place(name: str, value: Tensor) -> None:
            tensor = buffers[name] if name in buffers else placement.state[name]
            plan.put(tensor, value, free.to(tensor.device))

        return Step(
            layer=layer.index,
            shape=self.shape,
            positions=plan.in_use(placement.positions).to(keys.device),
            keys=keys,
            values=plan.in_use(buffers["values"]),
            state={name: plan.in_use(buffers[name]) for name in layer.slot_tensors if name in buffers},
            memory={name: memory[: plan.rows] for name, memory in layer.memory.items()},
            entered=entered,
            place=place,
            query_positions=plan.query_positions(keys.device),
            budgets=plan.budgets(keys.device),
            steady=plan.steady,
            budget=plan.common_budget,
            signals=Signals(self.policy.signals),
            shared=shared,
            carried=self._carried,
            dense=plan.dense,
            ends_prompt=plan.ends_prompt,
            cuts=plan.cuts,
        )

    def _labels(self, layer: int, positions: Tensor) -> Tensor | None:
        """The labels of entries at `positions` `[rows, new]`, NaN where there are none."""
        if not self.policy.needs_labels:
            return None
        rows, new = positions.shape
        labels = torch.full((rows, self.shape.kv_heads, new), torch.nan, device=positions.device)
        for index, row in enumerate(self.rows):
            if row.labels is not None:
                own, at = row.labels[layer].to(positions.device), positions[index].long()
                last = own.shape[1] - 1
                labels[index] = own[:, at.clamp(0, last)].masked_fill((at < 0) | (at > last), torch.nan)
        return labels

    def _unrotate_angles(self, keys: Tensor, plan: ForwardPlan) -> Callable[..., tuple[Tensor, Tensor]] | None:
        if self.inv_freq is None:
            return None
        if self.inv_freq.device != keys.device:
            self.inv_freq = self.inv_freq.to(keys.device)
        return partial(plan.unrotate_angles, self.inv_freq, keys.dtype)

    def close(self, plan: ForwardPlan) -> None:
        """After the last layer: count what decode queries saw, and free what only the prompt needed."""
        masks = self.policy.masks_heads
        for row, after, entries, target in zip(self.rows, plan.after, plan.entries, plan.targets, strict=True):
            if plan.single and plan.decodes:
                taken = self.charge.cost(after)
                unseen = after - self.policy.visible_entries(after, entries[-2], self.shape) if masks else 0
                row.occupancy.add(taken, taken - unseen if masks else None)
            row.freed_slot = plan.one_out and target is not None
        super().close(plan)
        if self.prompt_done:
            for layer in self.evicting:
                layer.end_prompt(keep_queries=self.policy.window_in_decode)
        if self.shift is not None:
            self.shift.end()
        self.eviction.reset()
        self._carried = {}

    # Room.

    def _make_room(self, plan: ForwardPlan, keys: Tensor) -> None:
        """Slots for the pass: exactly as many as will be needed where that is known, else in blocks."""
        rows = max(self.row_capacity or 0, plan.rows)
        needed = max(plan.before) + plan.queries
        if self.placements and self.evicting[0].buffers:
            buffer = self.evicting[0].buffers["keys"]
            if buffer.shape[2] >= needed and buffer.shape[0] >= rows:
                return
        bound = max(entries[-1] for entries in plan.entries) - 1 + plan.queries
        if not self.prompt_done:
            length = self.prompt_length or needed
            wanted = length if self.dense else min(length, bound)
        else:
            wanted = bound if self.has_fixed_size else blocks(needed)
        self.reserve(rows, max(needed, wanted), keys)

    @property
    def has_fixed_size(self) -> bool:
        """The budget is a number of entries, and the policy never holds more."""
        return self.budget is not None and self.budget.tokens is not None and self.policy.enforces_budget

    def reserve(self, rows: int, capacity: int, like: Tensor) -> None:
        """Make every buffer `rows` x `capacity`, keeping what is held.

        Layers without buffers make theirs when their first keys arrive, on their own device; `like` gives the first
        device.
        """
        if not self.placements:
            sets = self.shape.kv_heads if self.policy.granularity == "head" else 1
            count = 1 if self.policy.granularity == "model" else self.shape.layers
            shared = self.policy.shared_state(self.shape)
            self.placements += [Placement(sets, like.device, shared) for _ in range(count)]
        for placement in self.placements:
            self.bytes.add(-placement.nbytes())
            placement.resize(rows, capacity)
            self.bytes.add(placement.nbytes())
        for layer in self.evicting:
            if layer.buffers:
                layer.resize(rows, capacity, layer.buffers["keys"], self.dense and not self.prompt_done)

    def compact(self) -> None:
        """Before a chunk: fill the slots that decode has freed, and put the sinks' keys back as they were cached."""
        if self.shift is not None:
            self.shift.restore([layer.buffers.get("keys") for layer in self.evicting])
        if not any(row.freed_slot for row in self.rows):
            return
        held = [row.held for row in self.rows]
        for layer in self.evicting:
            placement = self.placement(layer.index)
            device = layer.buffers["keys"].device
            free = placement.free[: len(held)].to(device)
            layer.fill_freed_slots(free, torch.tensor(held, device=device))
        for placement in self.placements:
            placement.fill_freed_slots(torch.tensor(held, device=placement.device))
        for row in self.rows:
            row.freed_slot = False

    # Rows that come and go.

    def admit(self, prompt: SlotCache) -> int:
        """Copy the slots of a one-row cache, its policy's state included, into the next free row; returns that row."""
        index = self.next_free_row()
        prompt.compact()
        self.prompt_done = True
        (source_row,) = prompt.rows
        held, like = source_row.held, prompt.evicting[0].buffers["keys"]
        if not (self.evicting[0].buffers and self.evicting[0].capacity > held):
            entries = prompt.allowance(source_row, source_row.seen + 1) if self.has_fixed_size else 0
            self.reserve(self.row_capacity or 1, entries if entries > held else blocks(held + 1), like)
        for source, target in zip(prompt.evicting, self.evicting, strict=True):
            placement = self.placement(target.index)
            if not target.buffers:
                keys = source.buffers["keys"]
                if len(self.placements) > 1:
                    placement.move_to(keys.device)
                target.resize(self.row_capacity or 1, placement.capacity, keys, dense=False)
            target.copy_row(source, 0, index, held)
        for source_placement, placement in zip(prompt.placements, self.placements, strict=True):
            placement.copy_row(source_placement, 0, index, held)
            placement.free[index] = held
        if self.shift is not None:
            self.shift.drop_row(index)
        labels = source_row.labels
        if labels is not None and labels[0].shape[1] <= source_row.seen:
            labels = None  # none is left for the tokens that come
        self.admit_fixed(prompt, index)
        self.rows.append(Sequence(source_row.seen, held, source_row.prompt, labels=labels))
        return index

    def release(self, row: int) -> None:
        """End the sequence in a row: the slots of the last row are copied over it."""
        last = len(self.rows) - 1
        if row != last:
            for layer in self.evicting:
                layer.copy_row(layer, last, row, layer.capacity)
            for placement in self.placements:
                placement.copy_row(placement, last, row, placement.capacity)
            if self.shift is not None:
                self.shift.move_row(last, row)
        self.release_fixed(row)
        self.rows[row] = self.rows[last]
        self.rows.pop()


def blocks(slots: int) -> int:
    """The number of slots that so many need, in whole blocks."""
    return -(-slots // GROWTH_BLOCK) * GROWTH_BLOCK
