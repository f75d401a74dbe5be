"""Decode caches filled with random entries: as after a prompt of any length, without reading one.

The cost of a decode step depends on how many entries are held, not on what they are. Sinks and the last positions are
there, the others are drawn from the text; keys and values come from the standard normal distribution. Each row's prompt
is filled by itself and then admitted by the engine; tests compare the cache with one that has read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.paged.expiry import ExpiryCache
from evictbench.cache.rows import Sequence
from evictbench.cache.slots.cache import SlotCache
from evictbench.errors import UserError
from evictbench.policy.step import NEVER

if TYPE_CHECKING:
    from evictbench.cache.base import KVCache
    from evictbench.cache.forward_plan import ForwardPlan
    from evictbench.generation.runner import ModelRunner

SPREAD = 0.5
"""The shortest of ragged heads is so much shorter than the mean, as a share of it, and the longest so much longer."""


def filled(runner: ModelRunner, rows: int, seen: int, seed: int = 0) -> KVCache:
    """A decode cache of so many rows, each of which has seen `seen` tokens, and holds what its policy keeps of them.

    Raises UserError for a policy whose state is more than random numbers (a ring of queries, entries that compete).
    """
    generator = torch.Generator(runner.model.device).manual_seed(seed)
    decoding = runner.new_cache(rows=rows)
    for row in range(rows):
        prompt = runner.new_cache(prompt_length=seen)
        prompt.rows = [Sequence(prompt=seen)]
        plan = prompt.plan(seen, [seen], None, ends_prompt=True)
        size = (1, prompt.shape.kv_heads, 1, prompt.shape.head_dim)
        like = torch.empty(size, dtype=runner.model.dtype, device=runner.model.device)
        if isinstance(prompt, ExpiryCache):
            _fill_pages(prompt, plan, like, row, rows, generator)
        elif isinstance(prompt, SlotCache) and not _needs_reading(prompt):
            _fill_slots(prompt, plan, like, generator)
        else:
            raise UserError(f"A cache of {runner.policy.name} is filled by reading only.")
        prompt.close(plan)
        decoding.admit(prompt)
    return decoding


def _needs_reading(cache: SlotCache) -> bool:
    """Whether a policy's state is more than numbers that may be drawn."""
    return cache.policy.masks_heads or "window_probs" in cache.policy.signals


def _fill_slots(cache: SlotCache, plan: ForwardPlan, like: Tensor, generator: torch.Generator) -> None:
    """Fill a prompt's cache with as many entries as the plan of its pass leaves."""
    (held,), ((*_, budget),), (seen,) = plan.held, plan.entries, plan.seen
    cache.reserve(1, held, like)
    for layer in cache.evicting:
        layer.resize(1, held, like, dense=False)
        for name, buffer in layer.buffers.items():
            _draw(buffer, generator, normal=name in ("keys", "values"))
        for memory in layer.memory.values():
            _draw(memory, generator)
    recent = int(cache.policy.recent(budget))
    for placement in cache.placements:
        sets = placement.positions.shape[1]
        placement.positions[0] = positions(sets, held, seen, cache.policy.sinks, recent, generator)
        placement.free[:] = held
        for tensor in (*placement.state.values(), *placement.memory.values()):
            _draw(tensor, generator)


def _draw(tensor: Tensor, generator: torch.Generator, normal: bool = False) -> None:
    """Fill a tensor from the normal distribution, or with numbers between 0 and 1, of which scores are made."""
    if normal:
        tensor.normal_(generator=generator)
    elif tensor.is_floating_point():
        tensor.uniform_(generator=generator)


def positions(sets: int, held: int, seen: int, sinks: int, recent: int, generator: torch.Generator) -> Tensor:
    """So many of the first `seen` positions for each set, ascending: the sinks, the last ones, others by chance.

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
    cache: ExpiryCache, plan: ForwardPlan, like: Tensor, row: int, rows: int, generator: torch.Generator
) -> None:
    """Fill a prompt's cache with entries that never expire, and the window, in which marked ones wait for their expiry.

    row, rows: which of how many rows this is; heads of all rows together differ in length.
    """
    cache.open(plan, like)
    (seen,), heads, device = plan.seen, cache.shape.kv_heads, like.device
    share = 1.0 if cache.budget is None else cache.budget.at(seen, seen) / seen
    window = min(seen, int(getattr(cache.policy, "reach", 0)))
    lengths = spread_lengths(rows * heads, min(1.0, share) * seen, seen, window)
    marked = 1 - (sum(lengths) / len(lengths) - window) / max(1, seen - window)
    own = lengths[row * heads : (row + 1) * heads]
    longest = max(own)
    for layer in cache.evicting:
        layer.pool = cache.new_pool(1, like)
        keys, values = torch.empty((2, heads, longest, like.shape[-1]), dtype=like.dtype, device=device)
        # Shorter heads have entries in front that have expired, and that the pool does not take.
        entries = {
            "keys": keys.normal_(generator=generator),
            "values": values.normal_(generator=generator),
            "positions": torch.zeros((heads, longest), dtype=torch.int32, device=device),
            "expiry": torch.zeros((heads, longest), dtype=torch.int32, device=device),
        }
        for head, length in enumerate(own):
            at = positions(1, length, seen, 0, window + 1, generator)[0]
            waits = torch.rand(length, generator=generator, device=device) < marked
            waits &= (at >= seen - window) & (at < seen - 1)  # the next token decides about the last one
            entries["positions"][head, longest - length :] = at
            entries["expiry"][head, longest - length :] = torch.where(waits, at + window + 1, NEVER)
        layer.pool.write_chunk(0, entries, seen)


def spread_lengths(owners: int, mean: float, seen: int, window: int) -> list[int]:
    """Entries of each head: its window, and older ones, more or fewer than the mean, evenly spread."""
    older, room = max(0.0, mean - window), seen - window
    widest = min(SPREAD, room / older - 1) if older else 0.0
    steps = [2 * (owner + 0.5) / owners - 1 for owner in range(owners)]
    return [window + min(room, round(older * (1 + widest * step))) for step in steps]
