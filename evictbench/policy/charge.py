"""What a policy's state costs: the entries by which it makes a budget smaller.

The rule: the numbers that are held for a policy in one KV head of one layer, besides keys, values and positions, are
charged as entries of head_dim + value_dim numbers, whatever their dtype, and only whole entries count. What does not
grow with the entries is charged once. What travels with each entry is charged with each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

from evictbench.policy.step import MemoryTensor

if TYPE_CHECKING:
    from evictbench.policy.step import ModelShape, SlotTensor


@dataclass(frozen=True)
class Charge:
    """What a policy is charged, in whole entries per KV head.

    fixed: for state that does not grow with the entries. per_entry: for state that travels with one entry.
    """

    fixed: int = 0
    per_entry: int = 0

    def slots(self, budget: int) -> int:
        """How many entries a budget leaves room for."""
        return (budget - self.fixed) // (1 + self.per_entry)

    def cost(self, entries: int) -> int:
        """What so many entries take of a budget."""
        return self.fixed + entries * (1 + self.per_entry)


def charge(
    shape: ModelShape, states: Iterable[tuple[SlotTensor | MemoryTensor, int]], fixed_numbers: int = 0
) -> Charge:
    """The charge for a policy's state.

    shape: the model's sizes. states: each tensor that is held, and how many KV heads hold it together. A slot tensor
    that is held `while_dense` is gone when decode begins, and is not charged. fixed_numbers: other numbers that are
    held for each KV head of a layer.
    """
    fixed, per_entry = Fraction(fixed_numbers), Fraction()
    for tensor, sharing in states:
        if isinstance(tensor, MemoryTensor):
            fixed += Fraction(prod(tensor.size), sharing)
        elif not tensor.while_dense:
            per_entry += Fraction(tensor.width or 1, sharing)
    entry = shape.entry_numbers
    return Charge(int(fixed // entry), int(per_entry // entry))
