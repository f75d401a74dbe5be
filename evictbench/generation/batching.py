"""Rows that start alone and go on together: a finished row is replaced at once, and running out of memory halves them.

What a row does is the caller's (`Work`): generation chooses tokens, fidelity is told them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from evictbench.cache.forward_plan import Occupancy
from evictbench.cache.paged.cache import PagedCache
from evictbench.cache.slots.cache import GROWTH_BLOCK, EvictionCache

if TYPE_CHECKING:
    from evictbench.cache.slots.cache import EvictionCache


Done = TypeVar("Done", covariant=True)


class Row(Protocol):
    """A sequence under way: what it was made from, and whether nothing is left to do for it."""

    item: Any

    @property
    def ended(self) -> bool:
        """Nothing is left to do for it."""


AnyRow = TypeVar("AnyRow", bound=Row)


class Work(Protocol[AnyRow, Done]):
    """What is done with rows. batch_size: how many go on together; lowered when memory runs out."""

    batch_size: int

    def start(self, item: Any, /) -> tuple[AnyRow, EvictionCache]:
        """Make a row of an item, with its prompt in a one-row cache."""

    def new_cache(self, *, rows: int) -> EvictionCache:
        """An empty cache with room for so many rows."""

    def step(self, rows: list[AnyRow], cache: EvictionCache, /) -> None:
        """One token further, for every row of the cache, in its order."""

    def finish(self, row: AnyRow, cache: EvictionCache | None, index: int, /) -> Done:
        """The result of a row that has ended, which is row `index` of the cache if there is one."""


def work_through(work: Work[AnyRow, Done], items: Iterable[Any]) -> Iterator[Done]:
    """Results as rows end, in any order. After a failure of memory, the rows under way start again, half as many."""
    import torch

    coming = iter(items)
    again: deque[Any] = deque()
    active: list[AnyRow] = []
    cache: EvictionCache | None = None
    while True:
        item: Any = None
        try:
            while len(active) < work.batch_size:
                item = again.popleft() if again else next(coming, None)
                if item is None:
                    break
                with torch.inference_mode():
                    row, prompt = work.start(item)
                    if not row.ended:
                        cache = cache or work.new_cache(rows=work.batch_size)
                        admit(cache, prompt)
                        active.append(row)
                item = None
                if row.ended:
                    yield work.finish(row, None, 0)
            if not active or cache is None:
                return
            with torch.inference_mode():
                work.step(active, cache)
        except torch.OutOfMemoryError:
            if not active:
                raise
            # A step that failed half-way has left some layers ahead of others: these rows cannot go on.
            again.extendleft(row.item for row in reversed(active))
            if item is not None:
                again.append(item)
            work.batch_size = max(1, len(active) // 2)
            active, cache = [], None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            continue
        for index in range(len(active) - 1, -1, -1):
            if active[index].ended:
                yield work.finish(active[index], cache, index)
                with torch.inference_mode():
                    release(cache, index)
                active[index] = active[-1]
                active.pop()


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
