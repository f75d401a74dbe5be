"""The settings of IndexMem++'s training (`evictbench train --policy indexmem_pp --recipe beta=32,width=128`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evictbench.errors import UserError


@dataclass(frozen=True)
class Recipe:
    """How the scorer is trained.

    beta: the attention mass, in entries, that all entries beyond sinks and window share in training. width: of the
    scorer's hidden layer, in units. sinks: protected first positions; `--window` protects the recent ones. centroids:
    how many the weights' card asks for; the training does not use them. gate: "mass" (as published), or "plain" for
    comparison: each key is weighted by its score alone, so that equal scores hide nothing and nothing forces a choice.
    divergence: "reverse", KL(student ‖ teacher), as published, or "forward", KL(teacher ‖ student).
    """

    beta: float = 256.0
    width: int = 256
    sinks: int = 4
    centroids: int = 64
    gate: Literal["mass", "plain"] = "mass"
    divergence: Literal["reverse", "forward"] = "reverse"

    def __post_init__(self) -> None:
        if self.beta < 1 or self.width < 1 or self.sinks < 0 or self.centroids < 0:
            raise UserError(
                "indexmem_pp trains with a beta and a width of at least 1, and with sinks and centroids of 0 or more."
            )
