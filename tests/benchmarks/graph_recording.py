"""A recording as a CUDA graph makes one, for the CPU: operations on tensors, and nothing of what the host did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")
"""Operations by which the host waits for a device."""

HANDS_OVER = ("aten.lift_fresh",)
"""Tensors made of numbers on the host."""


class Tape(TorchDispatchMode):
    """Keeps every operation with its arguments, runs it, and can run all of them again on the same storages."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, found))
        return found

    def again(self) -> None:
        fresh: dict[int, torch.Tensor] = {}

        def now(item: Any) -> Any:
            return fresh.get(id(item), item) if isinstance(item, torch.Tensor) else item

        for func, args, kwargs, before in self.done:
            after = func(*tree_map(now, args), **tree_map(now, kwargs))
            for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                if isinstance(old, torch.Tensor):
                    fresh[id(old)] = new

    def illegal(self) -> set[str]:
        """What a CUDA graph cannot hold."""
        names = {str(func) for func, *_ in self.done}
        return {name for name in names if name.startswith((*WAITS, *HANDS_OVER))}


def on_tape(tapes: list[Tape]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A way to record, which puts its tape on the list."""

    def record(run: Callable[[], None]) -> Callable[[], None]:
        tape = Tape()
        with tape:
            run()
        tapes.append(tape)
        return tape.again

    return record
