"""EvictionCache: a transformers Cache made of fixed slots, from which a policy evicts after every forward pass.

The step, in every layer: write the new keys and values into free slots; attend, every query to what it may see;
show the policy the signals it declared; evict. `attention.py` drives it; this module owns the slots and the
bookkeeping. It works in the project's own generation loop and in plain `model.generate(...)`, left-padded batches
included:

    cache = EvictionCache(model, policy, budget=512)      # also sets the model's attention implementation
    model.generate(**inputs, past_key_values=cache)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from evictbench.cache.forward_plan import Occupancy, Pass
from evictbench.cache.rope import SinkShift, inverse_frequencies
from evictbench.cache.slots.eviction import evict_after
from evictbench.cache.slots.layer import SlotLayer
from evictbench.cache.slots.placement import Placement
from evictbench.errors import UserError
from evictbench.policy.base import Policy
from evictbench.policy.budget import Budget
from evictbench.policy.step import Entering, ModelShape, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.clock import Clock

GROWTH_BLOCK = 256
"""Slots by which a cache without a fixed budget grows in decode."""


class EvictionCache(Cache):
    """A KV cache that never shows a decode query more than its budget.

    model: used for its sizes and rotary frequencies; its attention implementation is set to "evictbench".
    budget: entries per KV head that a decode query may see, itself included (`Budget`, int, or "25%").
    prefill: "native" (the policy's own), "dense" or "bounded". prompt_length: tokens until the prompt ends and is
    cut for good (the context's, where the question must stay unseen); None: the first forward pass is the prompt.
    rows: room for this many sequences that are admitted one by one; None: as many as the first pass has.
    Its attribute `clock`, if set, is told what each part of a pass took. While `output_unread` is set, attention that
    shows the policy nothing is not computed: a pass from a recording.
    Raises UserError for a missing or impossible budget.
    """

    layers: list[SlotLayer]  # type: ignore[assignment]
    clock: Clock | None = None
    output_unread = False

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        budget: Budget | int | str | None = None,
        *,
        prefill: Literal["native", "dense", "bounded"] = "native",
        prompt_length: int | None = None,
        rows: int | None = None,
    ) -> None:
        from evictbench.cache.attention import use

        if policy.needs_budget and budget is None:
            raise UserError(f"{policy.name} needs a budget, in entries per KV head or in percent of the prompt.")
        self.policy = policy
        self.budget = Budget.parse(str(budget)) if policy.needs_budget else None
        self.shape = ModelShape.of(model.config)
        self.slot_tensors = policy.slot_state(self.shape)
        self.memory_tensors = policy.memory(self.shape)
        self.shared_tensors = policy.shared_state(self.shape)
        self.has_recent = bool(policy.recent(GROWTH_BLOCK))
        self.charged = policy.charged_state(self.shape)
        self.minimum = policy.minimum_budget(self.shape)
        self.dense = self.budget is None or (policy.prefill if prefill == "native" else prefill) == "dense"
        self.prompt_length = prompt_length
        self.row_capacity = rows
        turns = policy.rotary or policy.reindexed_sinks
        self.inv_freq = inverse_frequencies(model, policy.name) if turns else None
        if self.budget is not None:
            policy.check_budget(self.budget)
            if self.budget.tokens is not None:
                self._refuse_below_minimum(self.budget.tokens)
        super().__init__(layers=[self.new_layer(index) for index in range(self.shape.layers)])
        use(model)
        self.reset()

    # What is held.

    def new_layer(self, index: int) -> SlotLayer:
        """A layer without entries."""
        return SlotLayer(self, index)

    def reset(self) -> None:
        """Forget every sequence and free every slot."""
        self.columns = 0
        self.prompt_done = False
        self.seen: list[int] = []
        self.held: list[int] = []
        self.prompts: list[int] = []
        self.holes: list[bool] = []
        self.occupancy: list[Occupancy] = []
        self.known: list[list[Tensor] | None] = []
        self.current: Pass | None = None
        self.placements: list[Placement] = []
        self.bytes_held = self.bytes_peak = 0
        self.shift = None
        if self.inv_freq is not None and self.policy.reindexed_sinks:
            self.shift = SinkShift(self.inv_freq, self.policy.sinks)
        for layer in self.layers:
            layer.forget()

    def placement(self, layer: int) -> Placement:
        """The placement of a layer: its own, or the whole model's."""
        return self.placements[layer if len(self.placements) > 1 else 0]

    def entries(self, row: int, seen: int) -> int:
        """Slots that a query may see as the `seen`-th token of its row: the budget, less what is charged.

        seen: the entries that are held, where a share of the budget is one of the cache.
        """
        if self.budget is None:
            return seen + 1
        budget = self.budget.at(0 if self.policy.share_of == "cache" else self.prompts[row], seen)
        self._refuse_below_minimum(budget)
        return budget - self.charged

    def foretell(self, labels: list[Tensor]) -> None:
        """What a dense run says of the tokens of the one sequence that comes next, `[kv_heads, tokens]` a layer."""
        self.known = [labels]

    def kept(self, layer: int, row: int = 0) -> Tensor:
        """The positions held now by each kept set of a layer, ascending: `[sets, held]` int64."""
        placement = self.placement(layer)
        positions = placement.positions[row, :, : self.held[row] + self.holes[row]].long().clone()
        if self.holes[row]:
            positions.scatter_(1, placement.free[row, :, None], torch.iinfo(torch.int64).max)
        return positions.sort(-1).values[:, : self.held[row]]

    def nbytes(self) -> int:
        """Bytes of everything held: keys, values, positions, the policy's state."""
        return (
            sum(layer.nbytes() for layer in self.layers)
            + sum(placement.nbytes() for placement in self.placements)
            + (self.shift.nbytes() if self.shift is not None else 0)
        )

    def row_bytes(self, row: int) -> int:
        """Bytes of one row's part of what is held."""
        return self.nbytes() // (self.row_capacity or len(self.seen))

    @property
    def reads_dense(self) -> bool:
        """The prompt has not ended, and is held whole until it has."""
        return self.dense and not self.prompt_done

    def count_bytes(self, change: int) -> None:
        """Keep the running total and its peak; called wherever buffers are made and freed."""
        self.bytes_held += change
        self.bytes_peak = max(self.bytes_peak, self.bytes_held)

    # One forward pass.

    def begin(self, new: Tensor, real: Tensor | None) -> Pass:
        """Before the first layer attends: plan the pass, make room, turn the sinks.

        new: the first layer's keys `[rows, kv_heads, queries, head_dim]`; real: which new tokens are not padding,
        `[rows, queries]` bool, or None.
        """
        rows = new.shape[0]
        if self.current is not None:
            raise RuntimeError("The last forward pass through this cache did not finish; reset() it first.")
        if not self.seen:
            self.seen, self.held, self.prompts = [0] * rows, [0] * rows, [0] * rows
            self.holes = [False] * rows
            self.occupancy = [Occupancy() for _ in range(rows)]
            self.known = self.known or [None] * rows
            if self.policy.foresees and (len(self.known) != rows or None in self.known):
                raise UserError(
                    f"{self.policy.name} needs labels from a dense run over the same text, and this cache was given "
                    "none: it works in evictbench's own runs and not in model.generate(...)."
                )
        if rows != len(self.seen):
            raise RuntimeError(f"This cache holds {len(self.seen)} sequences and was given {rows}.")
        step = Pass.plan(self, new.shape[2], real)
        self._make_room(step, new)
        if not step.single:
            self.straighten()
        elif self.shift is not None and not step.dense:
            shifts = [max(0, seen - entries[0]) for seen, entries in zip(step.seen, step.entries, strict=True)]
            self.count_bytes(self.shift.begin([layer.buffers.get("keys") for layer in self.layers], shifts))
        self.current = step
        return step

    def write(self, layer: SlotLayer, keys: Tensor, values: Tensor, step: Pass) -> Entering:
        """Put a layer's new entries into their slots, behind sinks that are turned for this step."""
        placement = self.placement(layer.index)
        if not layer.buffers:
            layer.resize(placement.positions.shape[0], placement.capacity, keys)
        if len(self.placements) > 1:
            placement.move_to(keys.device)
        if layer.index == 0 or len(self.placements) > 1:
            step.put(placement.positions, step.query_positions(keys.device)[:, None], placement.free)
            for name, tensor in placement.state.items():
                step.put(tensor, placement.shared[name].fill, placement.free)
        if self.shift is not None and step.single and (turned := self.shift.turned(layer.index)) is not None:
            layer.buffers["keys"][: step.rows, :, : self.policy.sinks] = turned
        entering = Entering(
            layer=layer.index,
            shape=self.shape,
            positions=step.query_positions(keys.device),
            keys=keys,
            values=values,
            turning_back=self._turning_back(keys, step),
            known=self._labels(layer.index, step.query_positions(keys.device)),
        )
        layer.write(entering, step, placement.free.to(keys.device))
        return entering

    def _labels(self, layer: int, positions: Tensor) -> Tensor | None:
        """The labels of entries at `positions` `[rows, new]`, NaN where there are none, for a policy that foresees."""
        if not self.policy.foresees:
            return None
        rows, new = positions.shape
        known = torch.full((rows, self.shape.kv_heads, new), torch.nan, device=positions.device)
        for row, labels in enumerate(self.known):
            if labels is not None:
                label, at = labels[layer].to(positions.device), positions[row].long()
                last = label.shape[1] - 1
                known[row] = label[:, at.clamp(0, last)].masked_fill((at < 0) | (at > last), torch.nan)
        return known

    def _turning_back(self, keys: Tensor, step: Pass) -> Callable[..., tuple[Tensor, Tensor]] | None:
        if self.inv_freq is None or not self.policy.rotary:
            return None
        if self.inv_freq.device != keys.device:
            self.inv_freq = self.inv_freq.to(keys.device)
        return partial(step.turning_back, self.inv_freq, keys.dtype)

    def finish(self, layer: SlotLayer, step: Pass, view: Step) -> None:
        """After a layer has attended: let the policy remember, evict, and close the pass after the last layer."""
        self.policy.observe(view)
        last = layer.index == self.shape.layers - 1
        evict_after(self, layer, step, view, last)
        if last:
            self._close(step)

    def _close(self, step: Pass) -> None:
        for row, (after, target) in enumerate(zip(step.after, step.targets, strict=True)):
            if step.single and self.prompt_done:
                entries = step.entries[row][-2]
                mean = self.policy.seen_of(after, entries, self.shape) + self.charged if self.policy.hides else None
                self.occupancy[row].add(after + self.charged, mean)
            self.holes[row] = step.one_out and target is not None
            self.held[row] = after if target is None else target
        self.seen = step.seen
        self.columns += step.queries
        self.prompt_done = self.prompt_done or step.ends_prompt
        for layer in self.layers if self.prompt_done else ():
            layer.forget_prompt()
        if self.shift is not None:
            self.shift.end()
        self.current = None

    # Room.

    def _make_room(self, step: Pass, new: Tensor) -> None:
        """Slots for the pass: exactly as many as will be needed where that is known, else in blocks."""
        rows = max(self.row_capacity or 0, step.rows)
        needed = max(step.before) + step.queries
        if self.placements and self.layers[0].buffers:
            buffer = self.layers[0].buffers["keys"]
            if buffer.shape[2] >= needed and buffer.shape[0] >= rows:
                return
        bound = max(entries[-1] for entries in step.entries) - 1 + step.queries
        fixed = self.budget is not None and self.budget.tokens is not None and self.policy.guarded
        if not self.prompt_done:
            length = self.prompt_length or needed
            wanted = length if self.dense else min(length, bound)
        else:
            wanted = bound if fixed else -(-needed // GROWTH_BLOCK) * GROWTH_BLOCK
        self.reserve(rows, max(needed, wanted), new)

    def reserve(self, rows: int, capacity: int, like: Tensor) -> None:
        """Make every buffer `rows` x `capacity`, keeping what is held. Layers without buffers make theirs when their
        first keys arrive, on their own device; `like` gives the first device."""
        if not self.placements:
            sets = self.shape.kv_heads if self.policy.shares == "head" else 1
            count = 1 if self.policy.shares == "model" else self.shape.layers
            self.placements = [Placement(sets, like.device, self.shared_tensors) for _ in range(count)]
        for placement in self.placements:
            self.count_bytes(-placement.nbytes())
            placement.resize(rows, capacity)
            self.count_bytes(placement.nbytes())
        for layer in self.layers:
            if layer.buffers:
                layer.resize(rows, capacity, layer.buffers["keys"])

    def straighten(self) -> None:
        """Before a chunk: fill the holes that decode left, and put the sinks' keys back as they were cached."""
        if self.shift is not None:
            self.shift.restore([layer.buffers.get("keys") for layer in self.layers])
        if not any(self.holes):
            return
        for layer in self.layers:
            placement = self.placement(layer.index)
            device = layer.buffers["keys"].device
            free, held = placement.free[: len(self.held)].to(device), torch.tensor(self.held, device=device)
            layer.close_holes(free, held)
        for placement in self.placements:
            placement.close_holes(torch.tensor(self.held, device=placement.device))
        self.holes = [False] * len(self.holes)

    def _refuse_below_minimum(self, budget: int) -> None:
        if budget < self.minimum:
            raise UserError(
                f"{self.policy.name} needs a budget of at least {self.minimum} entries on this model "
                f"({self.minimum - 1} are protected or charged), not {budget}."
            )

    # What transformers may ask and a cache that evicts cannot do.

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """What transformers would size a mask by."""
        return self.columns + query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, not kept; padding of a left-padded batch included."""
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams would share evicted entries."""
        raise UserError("Beam search is not supported under an eviction policy; sample or decode greedily.")

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Assisted decoding takes tokens back; what they evicted is gone."""
        raise UserError("A cache that evicts cannot take tokens back; assisted decoding is not supported.")
