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

from evictbench.eviction import evict, protected
from evictbench.placement import worst

if TYPE_CHECKING:
    from evictbench.cache import EvictionCache
    from evictbench.passes import Pass
    from evictbench.policy import Step
    from evictbench.slots import SlotLayer

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
