"""The settings of DMS's training (`evictbench train --policy dms --recipe ratio=8,ramp=0.8`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evictbench.errors import UserError


@dataclass(frozen=True)
class Recipe:
    """How the gate is trained.

    ratio: the compression ratio at the end. It starts at 1 and rises linearly during the first `ramp` of the steps (a
    share); the target of the closed share is 1 - 1 / ratio. temperature: of the soft decision (z + noise) /
    temperature. noise: the scale of that logistic noise, 1 as published; tokens are put in order where its density is
    high, at logits within a few times the scale. sinks: first positions that no decision touches. divergence:
    "forward", of the student from the dense model (KL(teacher ‖ student)), or "reverse".
    """

    ratio: float = 8.0
    ramp: float = 0.8
    temperature: float = 0.1
    noise: float = 1.0
    sinks: int = 4
    divergence: Literal["forward", "reverse"] = "forward"

    def __post_init__(self) -> None:
        positive = self.temperature > 0 and self.noise > 0
        if self.ratio < 1 or not 0 < self.ramp <= 1 or not positive or self.sinks < 0:
            raise UserError(
                "DMS trains with a ratio of at least 1, a ramp above 0 and at most 1, a temperature and a noise above "
                "0, and sinks of 0 or more."
            )

    def target(self, step: int, steps: int) -> float:
        """The target of the closed share at a step, counted from 0."""
        return 1 - 1 / (1 + (self.ratio - 1) * min(1.0, (step + 1) / (self.ramp * steps)))
