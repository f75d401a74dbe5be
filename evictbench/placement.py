"""Which position lies in which slot, and which slots survive a cut. No keys, no values, no policy."""

from __future__ import annotations

import torch
from torch import Tensor

from evictbench.deadlines import rank_by_score

EMPTY = -1


class Placement:
    """The slots of one layer, or of the whole model where the kept set is shared by it.

    positions: `[rows, sets, capacity]` int32, EMPTY where nothing lies. Slot order carries no meaning, except that
    filled slots are slots 0..held-1 of a row between cuts.
    free: `[rows, sets]` int64, the slot that the next decode token takes.
    """

    def __init__(self, sets: int, device: torch.device) -> None:
        self.positions = torch.full((0, sets, 0), EMPTY, dtype=torch.int32, device=device)
        self.free = torch.zeros((0, sets), dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        """Where it lies: with its layer, or with the model's first."""
        return self.positions.device

    def move_to(self, device: torch.device) -> None:
        """Follow a layer to its device."""
        if self.device != device:
            self.positions, self.free = self.positions.to(device), self.free.to(device)

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.positions.shape[2]

    def resize(self, rows: int, capacity: int) -> None:
        """New rows and slots are empty; what no longer fits is dropped."""
        old = self.positions
        self.positions = old.new_full((rows, old.shape[1], capacity), EMPTY)
        keep_rows, keep = min(rows, old.shape[0]), min(capacity, old.shape[2])
        self.positions[:keep_rows, :, :keep] = old[:keep_rows, :, :keep]
        if rows != self.free.shape[0]:
            free = self.free.new_zeros((rows, self.free.shape[1]))
            free[:keep_rows] = self.free[:keep_rows]
            self.free = free

    def compact(self, group: list[int] | None, index: Tensor, capacity: int | None) -> None:
        """Keep the slots `index` `[rows, sets, kept]`, moved to the front; the rest of the group's rows is empty."""
        rows = slice(0, index.shape[0]) if group is None else torch.tensor(group, device=index.device)
        kept_slots = index.shape[2]
        kept = self.positions[rows].gather(2, index)
        if capacity is not None:
            self.positions = self.positions.new_full((*self.positions.shape[:2], capacity), EMPTY)
        self.positions[rows, :, :kept_slots] = kept
        self.positions[rows, :, kept_slots:] = EMPTY

    def close_holes(self, held: Tensor) -> None:
        """Move the entry of slot `held` `[rows]` into the free slot, where those differ."""
        rows = held.shape[0]
        positions, target = self.positions[:rows], self.free[:rows, :, None]
        source = held.view(rows, 1, 1).expand(target.shape)
        positions.scatter_(2, target, positions.gather(2, source))
        positions.scatter_(2, source, EMPTY)
        self.free[:rows] = held[:, None]

    def nbytes(self) -> int:
        """Bytes of its storages."""
        return self.positions.untyped_storage().nbytes() + self.free.untyped_storage().nbytes()


def worst(score: Tensor, positions: Tensor, protected: Tensor | None) -> Tensor:
    """The slot with the lowest score, the latest position among equals: `[rows, sets]` int64."""
    if protected is not None:
        score = score.masked_fill(protected, _limits(score)[1])
    lowest = score.amin(-1, keepdim=True)
    return positions.masked_fill(score > lowest, EMPTY).argmax(-1)


def best(score: Tensor, positions: Tensor, protected: Tensor | None, target: int) -> Tensor:
    """The `target` best slots in slot order, `[rows, sets, target]` int64; empty slots come last."""
    low, high = _limits(score)
    score = score.expand(positions.shape)
    if protected is not None:
        score = score.masked_fill(protected, high)
    score = score.masked_fill(positions < 0, low)
    rank = rank_by_score(score, positions.masked_fill(positions < 0, torch.iinfo(torch.int32).max))
    return in_slot_order(rank < target, target)


def in_slot_order(keep: Tensor, target: int) -> Tensor:
    """The indices of the true entries of the last dimension, ascending, the first `target` of them."""
    return (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[..., :target]


def _limits(score: Tensor) -> tuple[float, float]:
    if score.is_floating_point():
        return -torch.inf, torch.inf
    limits = torch.iinfo(score.dtype)
    return limits.min, limits.max
