"""What a gate is asked, and the findings that it answers with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evictbench.gate.tolerances import LATENCY_TOLERANCE, TOLERANCE
from evictbench.store.select import ALL, Filters

Status = Literal["passed", "failed", "warning", "reproduced", "below", "above", "not comparable", "too few samples"]


@dataclass(frozen=True)
class GateRequest:
    """The options of `evictbench gate`, as given.

    folder: of runs. trainings: whether runs that differ in their weights alone are one row. base: "MODEL=BASE", models
    that were fine-tuned elsewhere and what each was made from. traces, baseline_traces: folders of traces; where none
    is named, those among the runs of the two sides.
    """

    folder: Path
    published: bool = False
    baseline: Path | None = None
    exact: bool = False
    paired: bool = False
    trainings: bool = False
    base: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    latency_tolerance: float = LATENCY_TOLERANCE
    traces: tuple[Path, ...] = ()
    baseline_traces: tuple[Path, ...] = ()
    filters: Filters = ALL
    junit: Path | None = None
    markdown: Path | None = None


@dataclass(frozen=True)
class Finding:
    """One question asked of one cell, and its answer.

    cell: policy @ budget ("h2o @ 256", "full"). quantity: "score", "kl", "ids" (the share of samples with equal
    tokens), "occupancy", "bytes", "latency" (a step's time over the full cache's), "retention", ... here, there: its
    value in the runs and in what they are compared with, in its own unit; None where there is none. difference: here -
    there; of a KL that must be equal, the largest difference of any text or part of it. low, high: the 95% interval of
    the difference. p: of the test that decided, corrected for the number of cells. samples: how many documents were
    compared. why: one sentence. fails: whether the gate fails because of this. finds: the true change for the worse
    that the test would find in 80 of 100 cases, where that is known. seen: the entries that queries saw here, in words,
    where the policy's budget is no bound. trainings, deviation: how many trainings the value here is the mean of, and
    their scores' standard deviation, None for fewer than two.
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
    finds: float | None = None
    seen: str | None = None
    trainings: int = 1
    deviation: float | None = None
