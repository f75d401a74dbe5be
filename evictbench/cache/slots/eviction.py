"""What leaves the slots after a forward pass.

In decode one entry of every kept set leaves, and only the next token needs its slot. So the engine looks for it at the
end of the pass, in many layers at once: one operation over all layers' heads costs little more than one over a single
layer's. A policy scores its entries as soon as a layer has attended or, if attention does not matter to it (`static`),
at the end of the pass too. After a chunk a layer's kept sets are cut to their size, and what stays moves to the front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from evictbench.cache.selection import best, in_slot_order, worst
from evictbench.policy.tiles import ELEMENTS_AT_ONCE

if TYPE_CHECKING:
    from evictbench.cache.buffers import ByteCounter
    from evictbench.cache.forward_plan import ForwardPlan
    from evictbench.cache.slots.layer import SlotLayer
    from evictbench.cache.slots.placement import Placement
    from evictbench.policy.base import Policy
    from evictbench.policy.step import Step


@dataclass(frozen=True)
class Scored:
    """A layer's positions `[rows, sets, slots]`, and scores that broadcast to them."""

    layer: int
    positions: Tensor
    score: Tensor


LayerView = TypeVar("LayerView", "Step", "Scored")


class Eviction:
    """Evicts from the slots of one cache.

    layers: the cache's layers. placements: one for each layer, or one for the model. bytes: counts what is held. Within
    a pass it remembers the layers' views or scores until the last layer has attended, and expiries by placement.
    """

    def __init__(
        self, policy: Policy, layers: Sequence[SlotLayer], placements: Sequence[Placement], bytes: ByteCounter
    ) -> None:
        self.policy = policy
        self.layers = layers
        self.placements = placements
        self.bytes = bytes
        self.reset()

    def reset(self) -> None:
        """A pass has ended: forget what it left."""
        self._steps: list[Step] = []
        self._scored: list[Scored] = []
        self._expiry: dict[int, Tensor] = {}

    def prepares_last(self, plan: ForwardPlan) -> bool:
        """Whether the policy prepares and scores all layers at the end of this pass (`Policy.prepare_layers`)."""
        return plan.single and self.policy.static and self.policy.granularity == "head"

    def expiry(self, plan: ForwardPlan, step: Step) -> Tensor | None:
        """When entries expire within a chunk of a static policy, `[rows, sets, slots]`; None if none does."""
        if not self.policy.static or not plan.cuts or plan.dense or plan.single:
            return None
        place = self._place(step.layer)
        if place not in self._expiry:
            self._expiry[place] = self.policy.expiry(step)
        return self._expiry[place]

    def after_layer(self, plan: ForwardPlan, step: Step) -> None:
        """A layer has attended: evict what must be evicted now, and the rest after the last layer."""
        last = step.layer == step.shape.layers - 1
        if self.prepares_last(plan):
            self._steps.append(step)
            if last:
                self._prepare_and_evict(plan)
        elif self.policy.granularity == "model":
            if last:
                self._evict(plan, step, self.layers)
        elif plan.cuts and plan.one_out:
            self._scored.append(Scored(step.layer, step.positions, self.policy.score(step)))
            if last:
                for scored in _groups(self._scored):
                    self._evict_one(plan, scored)
        else:
            self._evict(plan, step, [self.layers[step.layer]])

    def _prepare_and_evict(self, plan: ForwardPlan) -> None:
        """Let a static policy prepare the new entries of all layers, then evict from each."""
        for steps in _groups(self._steps):
            self.policy.prepare_layers(steps)
            if plan.cuts and plan.one_out:
                self._evict_one(plan, [Scored(step.layer, step.positions, self.policy.score(step)) for step in steps])
            else:
                for step in steps:
                    self._evict(plan, step, [self.layers[step.layer]])

    def _evict(self, plan: ForwardPlan, step: Step, layers: Sequence[SlotLayer]) -> None:
        """Cut the kept sets of these layers, which share one placement, to the pass's targets."""
        placement = self.placements[self._place(step.layer)]
        if not plan.cuts:
            placement.free[: plan.rows] = plan.free_slots(placement.device)
            return
        expiry = self._expiry.get(self._place(step.layer))
        if expiry is None and plan.one_out:
            self._evict_one(plan, [Scored(step.layer, step.positions, self.policy.score(step))])
            return
        positions, device = step.positions, step.positions.device
        score = kept = alive = None
        if expiry is None:
            score, kept = self.policy.score(step), self._protected(plan, positions)
        else:
            alive = (expiry.to(device) > plan.following(device)) & (positions >= 0)
        for group, target in plan.groups():
            rows = slice(0, plan.rows) if group is None else torch.tensor(group, device=device)
            if alive is not None:
                index = in_slot_order(alive[rows], target)
            else:
                assert score is not None
                index = best(score[rows], positions[rows], None if kept is None else kept[rows], target)
            capacity = _capacity_after_cut(plan, layers[0].capacity) if group is None else None
            for layer in layers:
                layer.compact(group, index.to(layer.buffers["keys"].device), capacity)
            self.bytes.add(-placement.nbytes())
            placement.compact(group, index.to(placement.device), capacity)
            self.bytes.add(placement.nbytes())
        placement.free[: plan.rows] = plan.free_slots(placement.device)

    def _evict_one(self, plan: ForwardPlan, layers: Sequence[Scored]) -> None:
        """In each of these layers, each row that is cut loses one entry of every kept set; the next token takes its
        slot."""
        positions = torch.cat([layer.positions for layer in layers], dim=1)
        score = torch.cat([layer.score.expand(layer.positions.shape) for layer in layers], dim=1)
        evicted = worst(score, positions, self._protected(plan, positions))
        if not all(target is not None for target in plan.targets):
            evicted = torch.where(plan.cut_rows(evicted.device), evicted, plan.free_slots(evicted.device))
        sets = layers[0].positions.shape[1]
        for layer, slots in zip(layers, evicted.split(sets, dim=1), strict=True):
            self.placements[self._place(layer.layer)].free[: plan.rows] = slots

    def _protected(self, plan: ForwardPlan, positions: Tensor) -> Tensor | None:
        """Sinks, the recent window and empty slots: `[rows, sets, slots]` bool; None where there are none."""
        device = positions.device
        front = None if self.policy.sinks == 0 and plan.level else positions < self.policy.sinks
        if not self.policy.recent(LARGE_BUDGET):
            return front

        def begins() -> Tensor:
            recent = self.policy.recent(plan.budgets(device)[:, -1, None, None])
            return (plan.following(device) - recent).to(torch.int32)

        window = positions > plan.once("window", device, begins)
        return window if front is None else front | window

    def _place(self, layer: int) -> int:
        """The number of a layer's placement."""
        return layer if len(self.placements) > 1 else 0


LARGE_BUDGET = 256
"""A policy that protects no recent entries under a budget of this size protects none at all."""


def _groups(layers: Sequence[LayerView]) -> Iterator[list[LayerView]]:
    """Neighbouring layers on one device, not too many at once."""
    group: list[LayerView] = []
    for layer in layers:
        size = (len(group) + 1) * layer.positions.numel()
        if group and (size > ELEMENTS_AT_ONCE or group[0].positions.device != layer.positions.device):
            yield group
            group = []
        group.append(layer)
    if group:
        yield group


def _capacity_after_cut(plan: ForwardPlan, now: int) -> int | None:
    """Slots of the buffers that replace a prompt's, so that its memory is freed; None: cut in place."""
    if plan.single or not (plan.decodes or plan.ends_prompt):
        return None
    capacity = max(entries[-1] for entries in plan.entries)
    return capacity if capacity < now else None
