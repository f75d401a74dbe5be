"""Which position lies in which slot, and the state that all who share a kept set hold once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from evictbench.cache.buffers import counted
from evictbench.policy.step import EMPTY, MemoryTensor, SlotTensor


class Placement:
    """The positions in the slots of one layer, or of the whole model if it shares one kept set.

    positions: `[rows, sets, capacity]` int32, EMPTY where nothing lies. The order of slots carries no meaning, but a
    row's filled slots are its first ones, except for one slot that decode has freed.
    free: `[rows, sets]` int64, the slot that the next decode token takes.
    state: the policy's shared tensors that travel with the entries, `[rows, sets, capacity(, width)]`. memory: those
    that do not, `[rows, sets, *size]`. shared: how they are declared.
    """

    def __init__(
        self, sets: int, device: torch.device, shared: Mapping[str, SlotTensor | MemoryTensor] | None = None
    ) -> None:
        self.positions = torch.full((0, sets, 0), EMPTY, dtype=torch.int32, device=device)
        self.free = torch.zeros((0, sets), dtype=torch.int64, device=device)
        self.shared = shared or {}
        self.state: dict[str, Tensor] = {}
        self.memory: dict[str, Tensor] = {}
        for name, tensor in self.shared.items():
            if isinstance(tensor, MemoryTensor):
                self.memory[name] = torch.empty((0, sets, *tensor.size), dtype=tensor.dtype, device=device)
            else:
                tail = (tensor.width,) if tensor.width else ()
                self.state[name] = torch.empty((0, sets, 0, *tail), dtype=tensor.dtype, device=device)

    @property
    def device(self) -> torch.device:
        """The device of its layer, or of the model's first layer."""
        return self.positions.device

    def move_to(self, device: torch.device) -> None:
        """Follow a layer to its device."""
        if self.device != device:
            self.positions, self.free = self.positions.to(device), self.free.to(device)
            self.state = {name: tensor.to(device) for name, tensor in self.state.items()}
            self.memory = {name: tensor.to(device) for name, tensor in self.memory.items()}

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.positions.shape[2]

    def resize(self, rows: int, capacity: int) -> None:
        """New rows and slots are empty; what no longer fits is dropped."""
        keep_rows, keep = min(rows, self.positions.shape[0]), min(capacity, self.capacity)

        def resized(old: Tensor, fill: float) -> Tensor:
            size = (rows, old.shape[1], capacity, *old.shape[3:])
            new = counted(partial(torch.full, size, fill, dtype=old.dtype, device=old.device))
            new[:keep_rows, :, :keep] = old[:keep_rows, :, :keep]
            return new

        self.positions = resized(self.positions, EMPTY)
        self.state = {name: resized(old, self.shared[name].fill) for name, old in self.state.items()}
        if rows == self.free.shape[0]:
            return

        def with_rows(old: Tensor, fill: float) -> Tensor:
            new = old.new_full((rows, *old.shape[1:]), fill)
            new[:keep_rows] = old[:keep_rows]
            return new

        self.free = with_rows(self.free, 0)
        self.memory = {name: with_rows(old, self.shared[name].fill) for name, old in self.memory.items()}

    def compact(self, group: list[int] | None, index: Tensor, capacity: int | None) -> None:
        """Keep the slots `index` `[rows, sets, kept]`, moved to the front; the rest of the group's rows is empty."""
        rows = slice(0, index.shape[0]) if group is None else torch.tensor(group, device=index.device)
        kept_slots = index.shape[2]
        kept = self.positions[rows].gather(2, index)
        if capacity is not None:
            size = (*self.positions.shape[:2], capacity)
            self.positions = counted(partial(torch.full, size, EMPTY, dtype=torch.int32, device=self.device))
        self.positions[rows, :, :kept_slots] = kept
        self.positions[rows, :, kept_slots:] = EMPTY
        for name, old in self.state.items():
            kept = old[rows].gather(2, _at(index, old))
            if capacity is not None:
                self.state[name] = old.new_zeros((*old.shape[:2], capacity, *old.shape[3:]))
            self.state[name][rows, :, :kept_slots] = kept

    def fill_freed_slots(self, held: Tensor) -> None:
        """Move the entry in slot `held` `[rows]` into the free slot, where those differ."""
        rows = held.shape[0]
        positions, target = self.positions[:rows], self.free[:rows, :, None]
        source = held.view(rows, 1, 1).expand(target.shape)
        positions.scatter_(2, target, positions.gather(2, source))
        positions.scatter_(2, source, EMPTY)
        for tensor in self.state.values():
            part = tensor[:rows]
            part.scatter_(2, _at(target, part), part.gather(2, _at(source, part)))
        self.free[:rows] = held[:, None]

    def copy_row(self, source: Placement, source_row: int, row: int, slots: int) -> None:
        """Take over the first `slots` of another placement's row, with their state."""
        self.positions[row, :, slots:] = EMPTY
        self.positions[row, :, :slots] = source.positions[source_row, :, :slots]
        self.free[row] = source.free[source_row]
        for name, tensor in self.state.items():
            tensor[row, :, :slots] = source.state[name][source_row, :, :slots]
        for name, memory in self.memory.items():
            memory[row] = source.memory[name][source_row]

    def nbytes(self) -> int:
        """Bytes of its storages."""
        tensors = (self.positions, self.free, *self.state.values(), *self.memory.values())
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _at(index: Tensor, tensor: Tensor) -> Tensor:
    """An index of slots `[rows, sets, n]`, for a tensor that may have a width behind them."""
    return index if tensor.dim() == 3 else index[..., None].expand(-1, -1, -1, tensor.shape[3])
