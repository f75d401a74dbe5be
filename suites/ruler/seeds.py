"""Random numbers that depend on the sample and on nothing else: not on how many samples, nor on their order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_NAME = "ruler 1"  # part of every seed: another name draws other samples

T = TypeVar("T")
Draws = Callable[[str], random.Random]  # purpose -> a fresh generator, the same at every call


def draws(task: str, seed: int, sample: int | str, attempt: int = 0) -> Draws:
    """Generators for one sample, one for each purpose ("keys", "places", ...).

    attempt: raised when a sample does not fit even with its least haystack and is drawn again.
    """
    return lambda purpose: random.Random(f"{_NAME} {task} {seed} {sample} {attempt} {purpose}")


def shuffled(rng: random.Random, items: Iterable[T]) -> Iterator[T]:
    """The items in random order, drawn one by one, so that the first ones do not depend on how many are taken."""
    left = list(items)
    for i in range(len(left)):
        j = rng.randrange(i, len(left))
        left[i], left[j] = left[j], left[i]
        yield left[i]
