"""What goes once a pass has attended: the policy's scores, or its deadlines, cut what is held to the pass's targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.placement import best, in_slot_order, worst

if TYPE_CHECKING:
    from evictbench.cache import EvictionCache
    from evictbench.passes import Pass
    from evictbench.policy import Step
    from evictbench.slots import SlotLayer


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
