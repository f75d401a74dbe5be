"""A sweep: all its cells are planned and checked first, then run by an executor."""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from evictbench.errors import UserError, WriteFailed, one_line
from evictbench.evaluation import run
from evictbench.evaluation.checks import check
from evictbench.evaluation.plan import RunPlan, SharedInputs, make_plan
from evictbench.evaluation.settings import RunSettings
from evictbench.store import run_folder
from evictbench.sweep.job import Job, JobResult
from evictbench.sweep.local import Event
from evictbench.sweep.progress import Progress, SweepCell, cell_title
from evictbench.sweep.shards import finished_samples, merge_shards, shard_folder

FAILURE = "failure.txt"
"""A file in the folder of a failed cell that holds the traceback. It is removed when the cell is done after all."""


class Executor(Protocol):
    """Does jobs: `evictbench.sweep.local.LocalWorkers`, `evictbench.sweep.ray.RayTasks`."""

    def run(self, jobs: Sequence[Job]) -> Generator[Event, None, None]:
        """Yield each job as it begins and ends. Closing the iterator stops the jobs after their current step."""


class Watcher(Protocol):
    """Follows a sweep, to show it."""

    def warn(self, sentence: str) -> None:
        """There is something that the user should know."""

    def show(self, progress: Progress) -> None:
        """Time has passed, or something has happened."""

    def ended(self, cell: SweepCell) -> None:
        """A cell is done, has failed, or was stopped."""


@dataclass(frozen=True)
class ImpossibleCell:
    """A cell that cannot be run. sentence: the reason."""

    settings: RunSettings
    sentence: str

    @property
    def title(self) -> str:
        """Policy, budget and suite."""
        return cell_title(self.settings.policy, self.settings.budget, self.settings.suite)


def plan_cells(
    settings: Sequence[RunSettings], phase: Callable[[str], None] = lambda _: None
) -> tuple[list[SweepCell], list[ImpossibleCell]]:
    """Check and plan every cell before a model is loaded. Prompts are made once for all cells that share them.

    phase: called with a description of each step that takes a while.
    Returns the planned cells, and the impossible ones: those whose policy cannot run at their budget. Raises UserError
    for whatever is wrong with the sweep as a whole (a name, an option, the model, the data), and for a cell without a
    budget that cannot be planned.
    """
    for cell_settings in settings:
        check(cell_settings)

    def planning(number: int, text: str) -> None:
        phase(f"planning cell {number} of {len(settings)}: {text}")

    shared: SharedInputs = {}
    cells: dict[Path, SweepCell] = {}
    impossible = []
    for number, cell_settings in enumerate(settings, start=1):
        try:
            plan = make_plan(cell_settings, partial(planning, number), shared)
        except UserError as error:
            if cell_settings.budget is None:
                raise
            impossible.append(ImpossibleCell(cell_settings, str(error)))
            continue
        if plan.folder not in cells:
            cells[plan.folder] = _cell(plan)
    return list(cells.values()), impossible


def sweep(cells: Sequence[SweepCell], executor: Executor, watcher: Watcher, shards: int = 1) -> Progress:
    """Make the missing samples of every cell, dealt to `shards` jobs each. A failed cell does not stop the others.

    Ctrl-C stops the executor, and raises KeyboardInterrupt once all finished samples are merged into their cells.
    """
    progress = Progress(cells)
    for cell in cells:
        try:
            merge_shards(cell.plan.folder, cell.plan.fingerprint)  # shards left by a sweep that was killed
        except run_folder.Held:
            pass  # the cell's own worker will report it, if it still is
        except (UserError, OSError) as error:
            cell.sentence = cell.sentence or str(error)
        if cell.sentence or cell.total == cell.done:
            _conclude(cell)
            watcher.ended(cell)
    jobs = _jobs(cells, shards)
    open_jobs = {index: sum(job.cell == index for job in jobs) for index in range(len(cells))}
    try:
        with closing(executor.run(jobs)) as events:
            for event in events if jobs else ():
                job, result = event or (None, None)
                if job is None:
                    progress.update()
                elif result is None:
                    progress.started(job)
                else:
                    open_jobs[job.cell] -= 1
                    _note(cells[job.cell], result, watcher)
                    progress.ended(job)
                    if not open_jobs[job.cell]:
                        _conclude(cells[job.cell])
                        watcher.ended(cells[job.cell])
                watcher.show(progress)
    except KeyboardInterrupt:
        for cell in cells:
            if cell.state in ("waiting", "running"):
                _conclude(cell, stopped=True)
        raise
    return progress


def _cell(plan: RunPlan) -> SweepCell:
    """A plan with the samples that are on the disk already."""
    keys = {planned.key for planned in plan.prompts}
    try:
        samples = finished_samples(plan.folder)
    except UserError as error:  # the other cells go on
        return SweepCell(plan, frozenset(), sentence=str(error))
    cell = SweepCell(plan, frozenset(samples.keys() & keys))
    cell.scores = {key: line["score"] for key, line in samples.items()}
    return cell


def _jobs(cells: Sequence[SweepCell], shards: int) -> list[Job]:
    """The jobs that make the missing samples, in the order of the cells. Their folders are made here."""
    name = uuid.uuid4().hex[:12]
    jobs = []
    for index, cell in enumerate(cells):
        missing = cell.keys - cell.finished if cell.state == "waiting" else frozenset()
        parts = min(shards, len({key[1] for key in cell.keys}))
        for shard in range(parts):
            job = Job(
                cell=index,
                title=cell.title if parts == 1 else f"{cell.title}, shard {shard + 1} of {parts}",
                settings=cell.plan.settings,
                cell_folder=cell.plan.folder,
                folder=shard_folder(cell.plan.folder, shard, parts),
                shard=shard,
                shards=parts,
                sweep=name,
                directory=Path.cwd(),
            )
            if any(job.covers(key) for key in missing):
                job.folder.mkdir(parents=True, exist_ok=True)
                jobs.append(job)
    return jobs


def _note(cell: SweepCell, result: JobResult, watcher: Watcher) -> None:
    """Take over a job's warnings, and the first error of the cell."""
    for sentence in result.warnings:
        watcher.warn(f"{cell.title}: {sentence}")
    if result.status == "stopped" and not cell.sentence:
        cell.sentence = "Its worker was stopped."
    if result.status == "failed" and not cell.sentence:
        cell.sentence, cell.trace = result.sentence, result.trace


def _conclude(cell: SweepCell, stopped: bool = False) -> None:
    """Merge a cell's shards, write its summary, and set its state. A cell is done when no sample is missing."""
    folder = cell.plan.folder
    try:
        merge_shards(folder, cell.plan.fingerprint)
        if (folder / run_folder.RUN).exists():
            cell.summary = run.run_plan(cell.plan, _Quiet(), only=()).summary
    except (UserError, WriteFailed, OSError) as error:
        cell.sentence = cell.sentence or str(error)
    except Exception as error:  # the other cells go on
        cell.sentence = cell.sentence or f"{type(error).__name__}: {one_line(error)}"
        cell.trace = cell.trace or traceback.format_exc()
    cell.read()
    missing = cell.total - cell.done
    if not (missing or cell.sentence or stopped):
        cell.state = "done"
        (folder / FAILURE).unlink(missing_ok=True)
    elif stopped and not cell.sentence:
        cell.state = "stopped"
        with suppress(OSError):  # the folder of a cell that was never begun is empty
            folder.rmdir()
    else:
        cell.state = "failed"
        cell.sentence = cell.sentence or (
            f"{missing} of its samples are not here though its workers have ended: --out has to be on a disk that all "
            "nodes share."
        )
        with suppress(OSError):  # a full disk takes no file about that either
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FAILURE).write_text(f"{cell.sentence}\n\n{cell.trace}".rstrip() + "\n", encoding="utf-8")


class _Quiet:
    """The watcher of a run that only writes its summary."""

    def phase(self, text: str) -> None: ...
    def planned(self, plan: RunPlan, finished: int) -> None: ...
    def warn(self, sentence: str) -> None: ...
    def start(self, finished: Sequence[dict[str, Any]], total: int) -> None: ...
    def sample(self, line: dict[str, Any]) -> None: ...
