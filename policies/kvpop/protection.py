"""What is protected beside the pool. Training and use ask the same rule, so that a scorer is used as it was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from evictbench.policy.budget import PARTS

if TYPE_CHECKING:
    from torch import Tensor

SINKS, WINDOW = 4, 256
"""The paper's values, used where neither the settings nor the weights give others."""


@dataclass(frozen=True)
class Protection:
    """sinks: first positions. window: last positions, the query's own included. recent: the share of the entries that
    is protected as recent where that is more than the window; 0 as published."""

    sinks: int = SINKS
    window: int = WINDOW
    recent: float = 0.0

    @overload
    def last(self, entries: int) -> int: ...

    @overload
    def last(self, entries: Tensor) -> Tensor: ...

    def last(self, entries: Tensor | int) -> Tensor | int:
        """How many last positions are protected under so many entries, without the state that is charged. Where the
        share decides, one entry is left to choose."""
        share = round(self.recent * PARTS)
        if isinstance(entries, int):
            return max(self.window, min(share * entries // PARTS, entries - self.sinks - 1))
        import torch

        return torch.minimum(share * entries // PARTS, entries - self.sinks - 1).clamp(min=self.window)

    def pool(self, entries: int) -> int:
        """How many entries are chosen."""
        return entries - self.sinks - self.last(entries)
