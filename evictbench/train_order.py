"""What each step of a training sees: its blocks, its budget, its noise, from the seed and the step's number alone."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Order:
    """The blocks of every step. count: blocks to train on; rows: of one pass; passes: of one process in one step.

    Blocks come in an order that is drawn anew for every time round; the processes take turns.
    """

    seed: int
    count: int
    rows: int
    passes: int
    processes: int
    process: int
    _orders: dict[int, list[int]] = field(default_factory=dict)

    @property
    def per_step(self) -> int:
        """Blocks of one step, all processes together."""
        return self.rows * self.passes * self.processes

    def passes_of(self, step: int) -> Iterator[list[int]]:
        """The blocks of each forward pass of this process in a step."""
        for place in range(self.passes):
            first = step * self.per_step + (place * self.processes + self.process) * self.rows
            yield [self.block(first + row) for row in range(self.rows)]

    def block(self, place: int) -> int:
        """The block at a place of the whole training's order."""
        time_round, place = divmod(place, self.count)
        if time_round not in self._orders:
            order = list(range(self.count))
            random.Random(seed_of(self.seed, "order", time_round)).shuffle(order)
            if len(self._orders) > 1:  # a step may lie across two of them
                self._orders.pop(min(self._orders))
            self._orders[time_round] = order
        return self._orders[time_round][place]

    def used(self, steps: int, at_least: int) -> list[int]:
        """The blocks that so many steps see, all of the first `at_least` in order among them."""
        places = min(self.count, max(self.per_step * steps, at_least))
        return sorted(self.block(place) for place in range(places))


def drawn(seed: int, step: int, name: str, budgets: Sequence[int]) -> int:
    """The budget of one pass of a step."""
    return random.Random(seed_of(seed, "budget", step, name)).choice(list(budgets))


def seed_of(*parts: object) -> int:
    """A seed of 63 bits for numbers and words, the same on any machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1
