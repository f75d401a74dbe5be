"""How much of what a cache keeps lies inside a recency window, counted while rows decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evictbench.cache.rows import RecencyCount

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.cache.base import KVCache

SAME = "same"
"""The window that is as long as what a head keeps."""

EVERY = 32
"""Decode steps from one moment at which the kept positions are looked at to the next."""


@dataclass(frozen=True)
class RecencyWindow:
    """The window: so many last tokens, or "same", as many as a head keeps at that moment, each head its own number.

    Entries of a head that are hidden from it count like those that it sees, and slots that stand for several entries
    (centroids) do not count.
    """

    length: int | str = SAME
    every: int = EVERY

    def count(self, cache: KVCache) -> None:
        """Count one decode step of every row. It is looked at if it is the row's first, or `every` after the last."""
        for index, row in enumerate(cache.rows):
            count = row.recency = row.recency or RecencyCount()
            due = count.steps % self.every == 0
            count.steps += 1
            if due:
                self._look(cache, index, row.seen, count)

    def _look(self, cache: KVCache, index: int, seen: int, count: RecencyCount) -> None:
        import torch  # whoever checks options needs none of it

        shares, kept_any = zip(
            *(self._inside(cache.kept(layer, index).cpu(), seen) for layer in range(cache.shape.layers)), strict=True
        )
        inside, counts = torch.stack(shares), torch.stack(kept_any)
        count.moments += 1
        count.inside = inside if count.inside is None else count.inside + inside
        count.counts = counts if count.counts is None else count.counts + counts

    def _inside(self, kept: Tensor, seen: int) -> tuple[Tensor, Tensor]:
        """The share of each set's positions `[sets, held]` inside the window, and 1 where there are any, `[sets]`."""
        real = kept >= 0
        held = real.sum(-1)
        first = seen - (held if self.length == SAME else held.new_full(held.shape, int(self.length)))
        inside = (real & (kept >= first[:, None])).sum(-1)
        return inside.double() / held.clamp(min=1), (held > 0).double()
