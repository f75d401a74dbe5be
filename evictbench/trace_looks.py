"""Which positions a cache holds while it is traced: looked at now and then, for maps of retention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evictbench.cache import EvictionCache


class Looks:
    """Looks whenever `every` more tokens have been seen and at the end of each phase, into `rows` of retention.parquet;
    never where `every` is None."""

    def __init__(self, every: int | None, rows: list[dict[str, Any]]) -> None:
        self.every = every
        self.rows = rows
        self._next = every or 0

    def due(self, seen: int) -> bool:
        """Whether it is time to look."""
        if self.every is None or seen < self._next:
            return False
        self._next = (seen // self.every + 1) * self.every
        return True

    def end(self, cache: EvictionCache) -> None:
        """The end of a phase."""
        if self.every is not None and (not self.rows or self.rows[-1]["seen"] != cache.seen[0]):
            self.look(cache)

    def look(self, cache: EvictionCache) -> None:
        """Note what the first row's heads hold."""
        for layer in range(cache.shape.layers):
            held = cache.kept(layer).cpu()
            for head in range(cache.shape.kv_heads):
                positions = held[head if held.shape[0] > 1 else 0]
                self.rows.append(
                    {
                        "seen": cache.seen[0],
                        "layer": layer,
                        "head": head,
                        "positions": positions[positions >= 0].tolist(),
                    }
                )
