"""One layer's pages, and its prompts before they come into pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evictbench.cache.base import KVCache
from evictbench.cache.layers import EvictingLayer

if TYPE_CHECKING:
    from evictbench.cache.paged.pool import PagePool
    from evictbench.cache.paged.prompt import Prompt


class PagedLayer(EvictingLayer):
    """The pages of one layer.

    pool: made when the first entries come into pages. prompts: by row, what the layer holds of a prompt that lies plain
    until its end (`HeadBudgetCache` only).
    """

    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__(cache, index)
        self.pool: PagePool | None = None
        self.prompts: dict[int, Prompt] = {}

    def forget(self) -> None:
        """Free everything."""
        super().forget()
        self.pool, self.prompts = None, {}

    def nbytes(self) -> int:
        """Bytes of every storage this layer holds."""
        pages = 0 if self.pool is None else self.pool.nbytes()
        return pages + sum(prompt.nbytes() for prompt in self.prompts.values())
