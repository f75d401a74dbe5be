"""The progress of each cell of a sweep, read from the samples on the disk, whichever process writes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from evictbench.errors import UserError
from evictbench.store import run_folder
from evictbench.store.files import open_file
from evictbench.store.records import parse_sample
from evictbench.sweep.job import ANSWERING, Job, read_phase
from evictbench.sweep.shards import shard_folders

if TYPE_CHECKING:
    from evictbench.evaluation.plan import RunPlan

State = Literal["waiting", "running", "done", "failed", "stopped"]


def cell_title(policy: str, budget: str | None, suite: str) -> str:
    """The name of a cell in sentences: "h2o at 256 on ruler"."""
    return f"{policy}{f' at {budget}' if budget else ''} on {suite}"


@dataclass
class SweepCell:
    """A planned cell and its progress.

    keys: the samples asked for. finished: those that were finished before this sweep. sentence, trace: the error of a
    failed cell, and its traceback; a cell that is not run yet has one if its folder is damaged. summary: as in
    summary.json, once the cell has ended. phases: a job's folder to what its worker is doing. answering_since: when the
    first worker began to make samples. scores: those on the disk.
    """

    plan: RunPlan
    finished: frozenset[run_folder.Key]
    state: State = "waiting"
    sentence: str = ""
    trace: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    phases: dict[Path, str] = field(default_factory=dict)
    answering_since: float | None = None
    scores: dict[run_folder.Key, float] = field(default_factory=dict)
    _read: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = frozenset(planned.key for planned in self.plan.prompts)
        self.fingerprint = run_folder.fingerprint_hash(self.plan.fingerprint)

    @property
    def policy(self) -> str:
        """The policy with its settings."""
        return self.plan.checked.chosen.label

    @property
    def budget(self) -> str:
        """The budget, "" where there is none."""
        return "" if self.plan.checked.budget is None else str(self.plan.checked.budget)

    @property
    def suite(self) -> str:
        """The suite's name."""
        return self.plan.checked.suite.name

    @property
    def title(self) -> str:
        """Policy, budget, suite, and weights where they were named: "h2o at 256 on ruler"."""
        weights = self.plan.settings.weights
        return cell_title(self.policy, self.budget, self.suite) + (f", weights {weights}" if weights else "")

    @property
    def total(self) -> int:
        """The number of samples asked for."""
        return len(self.keys)

    @property
    def done(self) -> int:
        """The number of those that are finished."""
        return len(self.finished | (self.scores.keys() & self.keys))

    @property
    def made(self) -> int:
        """The number of those that were finished since this sweep began."""
        return len((self.scores.keys() & self.keys) - self.finished)

    def score(self) -> float | None:
        """The mean over tasks of the mean score so far, in [0, 1]."""
        by_task: dict[str, list[float]] = {}
        for key, score in self.scores.items():
            if key in self.keys:
                by_task.setdefault(key[0], []).append(score)
        return fmean(fmean(scores) for scores in by_task.values()) if by_task else None

    def read(self) -> None:
        """Read the samples that were written since the last call, to the cell and to its shards."""
        for folder in (self.plan.folder, *shard_folders(self.plan.folder)):
            for line in self._new_lines(folder / run_folder.SAMPLES):
                self.scores.setdefault(run_folder.key_of(line), line["score"])

    def read_phases(self, jobs: Sequence[Job], now: float) -> None:
        """Read what the workers of its running jobs are doing. now: seconds."""
        self.phases = {}
        for job in jobs:
            note = read_phase(job.folder, job.sweep)
            if note is not None:
                self.phases[job.folder] = note["phase"]
        if self.answering_since is None and ANSWERING in self.phases.values():
            self.answering_since = now

    def rate(self, now: float) -> float | None:
        """Samples per second since the first worker began to answer."""
        if self.answering_since is None or not self.made or now < self.answering_since + 1:
            return None
        return self.made / (now - self.answering_since)

    def _new_lines(self, file: Path) -> Iterator[dict[str, Any]]:
        """The whole lines of a samples file that were added since the last call."""
        try:
            with open_file(file) as stream:
                stream.seek(self._read.get(file, 0))
                data = stream.read()
        except UserError:
            return
        whole = data.rfind(b"\n") + 1
        self._read[file] = self._read.get(file, 0) + whole
        for raw in data[:whole].splitlines():
            with suppress(ValueError):  # opening the run to write to it reports what is wrong
                yield parse_sample(raw, self.fingerprint)


@dataclass
class Progress:
    """The progress of all cells of a sweep. clock: returns seconds."""

    cells: Sequence[SweepCell]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.began = self.clock()
        self.running: dict[int, list[Job]] = {}

    def started(self, job: Job) -> None:
        """A worker has begun a job."""
        self.running.setdefault(job.cell, []).append(job)
        cell = self.cells[job.cell]
        if cell.state == "waiting":
            cell.state = "running"

    def ended(self, job: Job) -> None:
        """A worker has ended a job."""
        jobs = self.running.get(job.cell, [])
        if job in jobs:
            jobs.remove(job)
        self.cells[job.cell].read()

    def update(self) -> None:
        """Read the progress of every cell that a worker is at."""
        now = self.clock()
        for index, jobs in self.running.items():
            if jobs:
                self.cells[index].read()
                self.cells[index].read_phases(jobs, now)

    def left(self, cell: SweepCell) -> float | None:
        """Seconds that a cell will still take at its rate; None where it has no rate yet."""
        rate = cell.rate(self.clock())
        return None if rate is None else (cell.total - cell.done) / rate

    def whole_left(self) -> float | None:
        """Seconds that the sweep will still take at the rate of all samples so far; None before the first."""
        made = sum(cell.made for cell in self.cells)
        missing = sum(cell.total - cell.done for cell in self.cells if cell.state in ("waiting", "running"))
        return (self.clock() - self.began) / made * missing if made else None
