"""The bytes that a cache holds, and how its buffers are made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GROWTH_BLOCK = 256
"""Slots by which a cache without a fixed budget grows in decode."""


class ByteCounter:
    """Bytes that a cache holds now, and the most that it has held. Whoever makes or frees a buffer counts it here."""

    def __init__(self) -> None:
        self.held = self.peak = 0

    def add(self, change: int) -> None:
        """Count bytes that are newly held, or freed where `change` is negative."""
        self.held += change
        self.peak = max(self.peak, self.held)


def counted(make: Callable[[], Tensor]) -> Tensor:
    """A new buffer whose writes torch counts even inside torch.inference_mode, so that a policy's own are found out."""
    with torch.inference_mode(False), torch.no_grad():
        return make()


def storage_bytes(*tensors: Tensor) -> int:
    """Bytes of the storages of tensors."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
