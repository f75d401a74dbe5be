"""Sequences that come and go in one decode cache: a prompt's survivors move in, a finished row gives its place up."""

from __future__ import annotations

from typing import Any

from evictbench.cache import GROWTH_BLOCK, EvictionCache
from evictbench.paged import PagedCache
from evictbench.passes import Occupancy


def admit(cache: EvictionCache, prompt: EvictionCache) -> int:
    """Copy what a one-row cache holds after its prompt into the next free row of `cache`; returns that row.

    Both caches must be of the same model, policy and budget; `cache` was made with `rows`.
    """
    if isinstance(cache, PagedCache) and isinstance(prompt, PagedCache):
        return cache.admit(prompt)
    row, rows = len(cache.seen), cache.row_capacity
    if rows is None or row >= rows:
        raise RuntimeError(f"All {rows} rows of this cache are taken.")
    prompt.straighten()
    cache.prompt_done = True
    held, fixed = prompt.held[0], cache.budget is not None and cache.budget.tokens is not None
    if not (cache.layers[0].buffers and cache.layers[0].capacity > held):
        entries = prompt.entries(0, prompt.seen[0] + 1) if fixed and cache.policy.guarded else 0
        blocks = -(-(held + 1) // GROWTH_BLOCK) * GROWTH_BLOCK
        cache.reserve(rows, entries if entries > held else blocks, prompt.layers[0].buffers["keys"])
    for source, target in zip(prompt.layers, cache.layers, strict=True):
        placement = cache.placement(target.index)
        if not target.buffers:
            if len(cache.placements) > 1:
                placement.move_to(source.buffers["keys"].device)
            target.resize(rows, placement.capacity, source.buffers["keys"])
        target.copy_row(source, 0, row, held)
    for source_placement, placement in zip(prompt.placements, cache.placements, strict=True):
        placement.copy_row(source_placement, 0, row, held)
        placement.free[row] = held
    if cache.shift is not None:
        cache.shift.drop_row(row)
    cache.seen.append(prompt.seen[0])
    cache.held.append(held)
    cache.prompts.append(prompt.prompts[0])
    cache.holes.append(False)
    cache.occupancy.append(Occupancy())
    known = prompt.known[0]
    cache.known.append(known if known is not None and known[0].shape[1] > prompt.seen[0] else None)
    return row


def release(cache: EvictionCache, row: int) -> None:
    """End the sequence in a row; the last row takes its place."""
    if isinstance(cache, PagedCache):
        cache.release(row)
        return
    last = len(cache.seen) - 1
    if row != last:
        for layer in cache.layers:
            layer.copy_row(layer, last, row, layer.capacity)
        for placement in cache.placements:
            placement.copy_row(placement, last, row, placement.capacity)
        if cache.shift is not None:
            cache.shift.move_row(last, row)
    lists: tuple[list[Any], ...] = (cache.seen, cache.held, cache.prompts, cache.holes, cache.occupancy, cache.known)
    for items in lists:
        items[row] = items[last]
        items.pop()
