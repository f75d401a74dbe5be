"""Decode under static priorities: all layers are decided at once, after the last of them has attended.

What is evicted then does not depend on attention, so that it can wait for the end of the pass; and one operation over
all layers' heads costs little more than one over one layer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from evictbench.eviction import evict, protected
from evictbench.placement import worst

if TYPE_CHECKING:
    from evictbench.cache import EvictionCache
    from evictbench.passes import Pass
    from evictbench.policy import Step

ELEMENTS_AT_ONCE = 2**24
"""Slots of so many layers are looked at together that they are about this many."""


def decide(cache: EvictionCache, step: Pass) -> None:
    """Let the policy settle what came in, then evict from every layer. `step.views` has one view a layer."""
    for views in _groups(step.views):
        cache.policy.settle(views)
        if step.cuts and step.one_out:
            _evict_one(cache, step, views)
        else:
            for view in views:
                evict(cache, [cache.layers[view.layer]], step, view)


def _evict_one(cache: EvictionCache, step: Pass, views: list[Step]) -> None:
    """Each row that is cut loses one entry a head; the next token will take its slot."""
    positions = torch.cat([view.positions for view in views], dim=1)
    score = torch.cat([cache.policy.score(view).expand(view.positions.shape) for view in views], dim=1)
    evicted = worst(score, positions, protected(cache, step, positions))
    if not all(target is not None for target in step.targets):
        evicted = torch.where(step.cut_rows(evicted.device), evicted, step.free_slots(evicted.device))
    sets = views[0].positions.shape[1]
    for view, part in zip(views, evicted.split(sets, dim=1), strict=True):
        cache.placement(view.layer).free[: step.rows] = part


def _groups(views: list[Step]) -> Iterator[list[Step]]:
    """Neighbouring layers on one device, not too many at once."""
    group: list[Step] = []
    for view in views:
        size = (len(group) + 1) * view.positions.numel()
        if group and (size > ELEMENTS_AT_ONCE or group[0].keys.device != view.keys.device):
            yield group
            group = []
        group.append(view)
    if group:
        yield group
