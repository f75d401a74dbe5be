"""Decode caches filled with random entries: as after a prompt of any length, without reading one.

What a decode step costs depends on how many entries are held, not on what they are. Sinks and the last positions are
there, the others are drawn from the text; keys and values come from the standard normal distribution. The cache is then
in the state that `admit` leaves: tests compare it with one that has read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.forward_plan import Occupancy
from evictbench.cache.paged.cache import PagedCache, PagedLayer, allotted
from evictbench.cache.paged.pool import NEVER, PAGE
from evictbench.cache.slots.cache import GROWTH_BLOCK, EvictionCache
from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.generation.runner import Feeder

SPREAD = 0.5
"""Of ragged heads the shortest is so much shorter than the mean, in share, and the longest so much longer."""


def filled(feeder: Feeder, rows: int, seen: int, seed: int = 0) -> EvictionCache:
    """A decode cache of so many rows, each of which has seen `seen` tokens, and holds what its policy keeps of them.

    Raises UserError for a policy whose state is more than random numbers (a ring of queries, entries that compete).
    """
    cache = feeder.new_cache(rows=rows)
    policy = feeder.policy
    if policy.contested or policy.hides or "window_probs" in policy.signals:
        raise UserError(f"A cache of {policy.name} is filled by reading only.")
    device = feeder.model.device
    generator = torch.Generator(device).manual_seed(seed)
    like = torch.empty((rows, cache.shape.kv_heads, 1, cache.shape.head_dim), dtype=feeder.model.dtype, device=device)
    cache.prompt_done = True
    cache.prompts = [seen] * rows
    held = seen
    if isinstance(cache, PagedCache):
        cache.allotted = [allotted(policy, cache.budget, seen)] * rows
        cache.columns = seen
        for layer in cache.layers:
            _fill_pages(cache, layer, rows, seen, like, generator)
    else:
        held = _fill_slots(cache, rows, seen, like, generator)
    cache.seen, cache.held = [seen] * rows, [held] * rows
    cache.holes = [False] * rows
    cache.occupancy = [Occupancy() for _ in range(rows)]
    cache.known = [None] * rows
    return cache


def _fill_slots(cache: EvictionCache, rows: int, seen: int, like: Tensor, generator: torch.Generator) -> int:
    """Returns the entries that each row holds."""
    held, entries = seen, cache.entries(0, seen + 1)
    if seen + 1 > entries:
        kept = cache.policy.keep(entries, "prompt")
        held = seen if kept is None else min(seen, kept)
    fixed = cache.budget is not None and cache.budget.tokens is not None and cache.policy.guarded
    capacity = entries if fixed and entries > held else -(-(held + 1) // GROWTH_BLOCK) * GROWTH_BLOCK
    cache.reserve(rows, capacity, like)
    for layer in cache.layers:
        layer.resize(rows, capacity, like)
        for name, buffer in layer.buffers.items():
            _draw(buffer[:, :, :held], generator, spread=name in ("keys", "values"))
        for memory in layer.memory.values():
            _draw(memory, generator)
    recent = int(cache.policy.recent(entries))
    for placement in cache.placements:
        sets = placement.positions.shape[1]
        found = positions(rows * sets, held, seen, cache.policy.sinks, recent, generator)
        placement.positions[:, :, :held] = found.view(rows, sets, held)
        placement.free[:] = held
        for tensor in placement.state.values():
            _draw(tensor[:, :, :held], generator)
        for memory in placement.memory.values():
            _draw(memory, generator)
    return held


def _draw(tensor: Tensor, generator: torch.Generator, spread: bool = False) -> None:
    """Fill it: from the normal distribution, or between 0 and 1, as what scores are made of."""
    if spread:
        tensor.normal_(generator=generator)
    elif tensor.is_floating_point():
        tensor.uniform_(generator=generator)


def positions(sets: int, held: int, seen: int, sinks: int, recent: int, generator: torch.Generator) -> Tensor:
    """For each set so many of the first `seen` positions, ascending: the sinks, the last ones, others by chance.

    `[sets, held]` int32. recent counts the next query's own entry, which is not there yet.
    """
    device = generator.device
    first = min(sinks, held)
    last = min(max(0, recent - 1), held - first)
    free, wanted = seen - first - last, held - first - last
    drawn = torch.randint(free - wanted + 1, (sets, wanted), generator=generator, device=device)
    between = drawn.sort(-1).values + torch.arange(wanted, device=device) + first
    front = torch.arange(first, device=device).expand(sets, -1)
    back = torch.arange(seen - last, seen, device=device).expand(sets, -1)
    return torch.cat((front, between, back), dim=1).to(torch.int32)


def _fill_pages(
    cache: PagedCache, layer: PagedLayer, rows: int, seen: int, like: Tensor, generator: torch.Generator
) -> None:
    """Entries that no mark has touched, and the window, in which the marked ones wait for their end."""
    pool = layer.pool = cache.new_pool(rows, like)
    owners, device = rows * cache.shape.kv_heads, like.device
    share = 1.0 if cache.budget is None else cache.budget.at(seen, seen) / seen
    window = min(seen, int(getattr(cache.policy, "reach", 0)))
    lengths = spread_lengths(owners, min(1.0, share) * seen, seen, window)
    marked = 1 - (sum(lengths) / owners - window) / max(1, seen - window)
    pool.take({owner: -(-length // PAGE) for owner, length in enumerate(lengths)})
    for name in ("keys", "values"):
        pool.buffers[name].normal_(generator=generator)
    for owner, length in enumerate(lengths):
        at = positions(1, length, seen, 0, window + 1, generator)[0]
        waits = torch.rand(length, generator=generator, device=device) < marked
        waits &= (at >= seen - window) & (at < seen - 1)  # the last token's mark comes with the next
        deadlines = torch.where(waits, at + window + 1, NEVER).to(torch.int32)
        slots = (pool.table(owner)[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()[:length]
        pool.buffers["positions"].view(-1)[slots] = at
        pool.buffers["deadlines"].view(-1)[slots] = deadlines
        pool.newest[owner] = slots[-1]
    pool.length[:owners] = torch.tensor(lengths, device=device)
    pool.look_ahead(torch.full((owners,), seen, dtype=torch.int32, device=device))


def spread_lengths(owners: int, mean: float, seen: int, window: int) -> list[int]:
    """Entries of each head: its window, and of what is older more or less than the mean, evenly spread."""
    older, room = max(0.0, mean - window), seen - window
    widest = min(SPREAD, room / older - 1) if older else 0.0
    steps = [2 * (owner + 0.5) / owners - 1 for owner in range(owners)]
    return [window + min(room, round(older * (1 + widest * step))) for step in steps]
