"""Do these runs still hold: what a gate asks of them, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "failed", "warning", "reproduced", "below", "above", "not comparable", "too few samples"]


@dataclass(frozen=True)
class Finding:
    """One question asked of one cell, and its answer.

    cell: policy @ budget ("h2o @ 256", "full"). quantity: "score", "kl", "occupancy", "bytes", "latency",
    "retention", ... here, there: its value in the runs, and in what they are held against, in its own unit; None
    where there is none. difference: here - there, low and high: its 95% interval. p: of the test that decided.
    samples: documents that it rests on. why: one sentence. fails: the gate is not passed because of this.
    """

    status: Status
    cell: str
    suite: str
    task: str
    quantity: str
    here: float | None
    there: float | None
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    samples: int
    why: str
    fails: bool
