"""When what leaves is found: in decode for all layers at once, after the last of them has attended.

The slot that an evicted entry leaves is wanted by the next token only, so that it can be found at the end of the pass;
and one operation over all layers' heads costs little more than one over one layer's. What a policy says of its entries
it says as soon as it has seen the layer's attention, or, where attention does not matter to it (`static`), at the end
as well (`settle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from evictbench.cache.selection import best, in_slot_order, worst

if TYPE_CHECKING:
    from evictbench.cache.forward_plan import Pass
    from evictbench.cache.slots.cache import EvictionCache
    from evictbench.cache.slots.layer import SlotLayer
    from evictbench.policy.step import Step


ELEMENTS_AT_ONCE = 2**24
"""Slots of so many layers are looked at together that they are about this many."""


@dataclass(frozen=True)
class Scored:
    """A layer's positions `[rows, sets, slots]`, and scores that broadcast to them."""

    layer: int
    positions: Tensor
    score: Tensor


Layer = TypeVar("Layer", "Step", "Scored")


def evict_after(cache: EvictionCache, layer: SlotLayer, step: Pass, view: Step, last: bool) -> None:
    """A layer has attended: evict now what can only be found now, and the rest after the last layer."""
    if step.settles:
        step.views.append(view)
        if last:
            _settle(cache, step)
    elif cache.policy.shares == "model":
        if last:
            evict(cache, cache.layers, step, view)
    elif step.cuts and step.one_out:
        step.scored.append(Scored(layer.index, view.positions, cache.policy.score(view)))
        if last:
            for scored in _groups(step.scored):
                _evict_one(cache, step, scored)
    else:
        evict(cache, [layer], step, view)


def _settle(cache: EvictionCache, step: Pass) -> None:
    """Let a static policy settle what came in, then evict from every layer. `step.views` has one view a layer."""
    for views in _groups(step.views):
        cache.policy.settle(views)
        if step.cuts and step.one_out:
            _evict_one(cache, step, [Scored(view.layer, view.positions, cache.policy.score(view)) for view in views])
        else:
            for view in views:
                evict(cache, [cache.layers[view.layer]], step, view)


def _evict_one(cache: EvictionCache, step: Pass, layers: Sequence[Scored]) -> None:
    """In each of these layers, each row that is cut loses one entry of every kept set, to the next token."""
    positions = torch.cat([of.positions for of in layers], dim=1)
    score = torch.cat([of.score.expand(of.positions.shape) for of in layers], dim=1)
    evicted = worst(score, positions, protected(cache, step, positions))
    if not all(target is not None for target in step.targets):
        evicted = torch.where(step.cut_rows(evicted.device), evicted, step.free_slots(evicted.device))
    sets = layers[0].positions.shape[1]
    for of, part in zip(layers, evicted.split(sets, dim=1), strict=True):
        cache.placement(of.layer).free[: step.rows] = part


def _groups(layers: Sequence[Layer]) -> Iterator[list[Layer]]:
    """Neighbouring layers on one device, not too many at once."""
    group: list[Layer] = []
    for of in layers:
        size = (len(group) + 1) * of.positions.numel()
        if group and (size > ELEMENTS_AT_ONCE or group[0].positions.device != of.positions.device):
            yield group
            group = []
        group.append(of)
    if group:
        yield group


def evict(cache: EvictionCache, layers: list[SlotLayer], step: Pass, view: Step) -> None:
    """Cut what these layers, which share one placement, hold to the pass's targets."""
    placement = cache.placement(layers[0].index)
    rows = step.rows
    if not step.cuts:
        placement.free[:rows] = step.free_slots(placement.device)
        return
    positions, device = view.positions, view.positions.device
    deadlines = step.deadlines.get(placement)
    if deadlines is not None:
        deadlines = deadlines.to(device)
    else:
        score, kept = cache.policy.score(view), protected(cache, step, positions)
        if step.one_out:
            evicted = worst(score, positions, kept)
            if not all(target is not None for target in step.targets):
                evicted = torch.where(step.cut_rows(device), evicted, step.free_slots(device))
            placement.free[:rows] = evicted
            return
    for group, target in step.groups():
        chosen = slice(0, rows) if group is None else torch.tensor(group, device=device)
        if deadlines is None:
            index = best(score[chosen], positions[chosen], None if kept is None else kept[chosen], target)
        else:
            alive = (deadlines > step.following(device)) & (positions >= 0)
            index = in_slot_order(alive[chosen], target)
        capacity = _capacity_after_cut(cache, step, layers[0].capacity) if group is None else None
        for layer in layers:
            layer.compact(group, index.to(layer.buffers["keys"].device), capacity)
        cache.count_bytes(-placement.nbytes())
        placement.compact(group, index.to(placement.device), capacity)
        cache.count_bytes(placement.nbytes())
    placement.free[:rows] = step.free_slots(placement.device)


def protected(cache: EvictionCache, step: Pass, positions: Tensor) -> Tensor | None:
    """Sinks, the recent window and empty slots: `[rows, sets, slots]` bool; None where there are none."""
    device = positions.device
    front = None if cache.policy.sinks == 0 and step.level else positions < cache.policy.sinks
    if not cache.has_recent:
        return front

    def begins() -> Tensor:
        recent = cache.policy.recent(step.budgets(device)[:, -1, None, None])
        return (step.following(device) - recent).to(torch.int32)

    window = positions > step.once("window", device, begins)
    return window if front is None else front | window


def _capacity_after_cut(cache: EvictionCache, step: Pass, now: int) -> int | None:
    """Slots of the buffers that replace a prompt's, so that its memory is freed; None: cut in place."""
    if step.single or not (cache.prompt_done or step.ends_prompt):
        return None
    capacity = max(entries[-1] for entries in step.entries)
    return capacity if capacity < now else None
