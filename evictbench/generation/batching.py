"""Continuous batching: rows start alone and go on together, and a finished row is replaced at once.

When memory runs out, half as many rows go on. What a row does is up to the `Worker`: generation chooses tokens,
fidelity is told them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from evictbench.cache.base import KVCache

if TYPE_CHECKING:
    from evictbench.cache.base import KVCache


Done = TypeVar("Done", covariant=True)


class Row(Protocol):
    """A sequence under way. item: what it was made from."""

    item: Any

    @property
    def ended(self) -> bool:
        """Nothing is left to do for it."""


AnyRow = TypeVar("AnyRow", bound=Row)


class Worker(Protocol[AnyRow, Done]):
    """The work that is done for each row. batch_size: rows in one batch; it is lowered when memory runs out."""

    batch_size: int

    def start(self, item: Any, /) -> tuple[AnyRow, KVCache]:
        """Make a row of an item, with its prompt in a one-row cache."""

    def new_cache(self, *, rows: int) -> KVCache:
        """An empty cache with room for so many rows."""

    def step(self, rows: list[AnyRow], cache: KVCache, /) -> None:
        """One token further, for every row of the cache, in its order."""

    def finish(self, row: AnyRow, cache: KVCache | None, index: int, /) -> Done:
        """The result of a row that has ended, which is row `index` of the cache if there is one."""


def continuous_batching(worker: Worker[AnyRow, Done], items: Iterable[Any]) -> Iterator[Done]:
    """Results as rows end, in any order. After a failure of memory, the rows under way start again, half as many."""
    waiting = iter(items)
    again: deque[Any] = deque()
    active: list[AnyRow] = []
    cache: KVCache | None = None
    while True:
        item: Any = None
        try:
            while len(active) < worker.batch_size:
                item = again.popleft() if again else next(waiting, None)
                if item is None:
                    break
                with torch.inference_mode():
                    row, prompt = worker.start(item)
                    if not row.ended:
                        cache = cache or worker.new_cache(rows=worker.batch_size)
                        cache.admit(prompt)
                        active.append(row)
                item = None
                if row.ended:
                    yield worker.finish(row, None, 0)
            if not active or cache is None:
                return
            with torch.inference_mode():
                worker.step(active, cache)
        except torch.OutOfMemoryError:
            if not active:
                raise
            # A step that failed half-way has left some layers ahead of others: these rows cannot go on.
            again.extendleft(row.item for row in reversed(active))
            if item is not None:
                again.append(item)
            worker.batch_size = max(1, len(active) // 2)
            active, cache = [], None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            continue
        for index in range(len(active) - 1, -1, -1):
            if active[index].ended:
                yield worker.finish(active[index], cache, index)
                with torch.inference_mode():
                    cache.release(index)
                active[index] = active[-1]
                active.pop()
