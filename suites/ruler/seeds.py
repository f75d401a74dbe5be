"""Random numbers that depend on the sample and on nothing else: not on how many samples, nor on their order."""

from __future__ import annotations

import random
from collections.abc import Callable

from .tasks import VERSION

Draws = Callable[[str], random.Random]  # purpose -> a fresh generator, the same at every call


def draws(task: str, seed: int, sample: int | str, attempt: int = 0) -> Draws:
    """Generators for one sample, one for each purpose ("keys", "places", ...).

    attempt: raised when a sample does not fit even with its least haystack and is drawn again.
    """
    return lambda purpose: random.Random(f"ruler {VERSION} {task} {seed} {sample} {attempt} {purpose}")
