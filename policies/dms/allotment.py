"""From a budget to a threshold: shares of a text, and the thresholds that were measured to keep them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evictbench.errors import UserError

OFF = math.inf
"""The threshold that marks nothing."""

PUBLISHED = 0.0
"""The threshold that a gate is trained with."""

ROUNDING = 1e-9

NEAR = 0.005
"""A budget that differs by less from the share that a checkpoint was trained for counts as that share."""


@dataclass(frozen=True)
class Calibration:
    """Thresholds and the shares that they were measured to keep, tightest first.

    beyond: for each threshold the kept share of the tokens that have left the window, which does not depend on a text's
    length. trained: the one share that a checkpoint was trained for, if it has no table; beyond is empty then.
    """

    thresholds: tuple[float, ...]
    beyond: tuple[float, ...]
    trained: float | None = None

    @classmethod
    def published(cls, ratio: float) -> Calibration:
        """The calibration of a checkpoint that was trained to keep one entry in `ratio`, at the threshold PUBLISHED."""
        return cls((PUBLISHED,), (), 1 / ratio)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Calibration:
        """The calibration in a card. data: equally long lists `thresholds` and `beyond`; UserError if they are not."""
        thresholds, beyond = data.get("thresholds") or [], data.get("beyond") or []
        if not thresholds or len(thresholds) != len(beyond):
            raise UserError("The calibration in the weights' card has no thresholds, each with the share it keeps.")
        rows: list[tuple[float, float]] = []
        for kept, threshold in sorted(zip(map(float, beyond), map(float, thresholds), strict=True)):
            if not rows or kept > rows[-1][0]:
                rows.append((kept, threshold))
        return cls(tuple(threshold for _, threshold in rows), tuple(kept for kept, _ in rows))

    def threshold(self, share: float, length: int, protected: int) -> float:
        """The threshold that keeps a share of a text of `length` tokens, `protected` of which are always kept (sinks,
        window, and the query's own).

        Between measured shares it is interpolated. A share above all measured ones gets the loosest threshold, which
        keeps less than is allowed. UserError: the share is below all measured ones, or not the one trained for.
        """
        if self.trained is not None:
            if abs(share - self.trained) > NEAR:
                raise UserError(
                    f"This checkpoint was trained to keep {self.trained:.1%} of a text, and has no calibration for "
                    f"{share:.1%}: use --budget {self.trained * 100:g}%."
                )
            return self.thresholds[0]
        if length <= protected:
            return self.thresholds[-1]
        share_beyond = (share * length - protected) / (length - protected)
        least = self.beyond[0]
        if share_beyond < least - ROUNDING:
            floor = (protected + least * (length - protected)) / length
            raise UserError(
                f"A budget of {share:.1%} of {length} tokens is less than dms keeps at its tightest calibrated "
                f"threshold: {protected} protected entries and {least:.1%} of the others, {floor:.1%} in all."
            )
        index = bisect_left(self.beyond, share_beyond)
        if index >= len(self.beyond):
            return self.thresholds[-1]
        if index == 0:
            return self.thresholds[0]
        low, high = self.beyond[index - 1], self.beyond[index]
        fraction = (share_beyond - low) / (high - low)
        return self.thresholds[index - 1] + fraction * (self.thresholds[index] - self.thresholds[index - 1])
