"""A grid of cells, one after another or side by side: planned and checked first, then run by an executor."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evictbench.errors import UserError
from evictbench.evaluation import run
from evictbench.evaluation.plan import Kept, make_plan
from evictbench.store import run_folder
from evictbench.sweep.grid import merge, shard_folder, shard_folders
from evictbench.sweep.job import Ended, Job
from evictbench.sweep.progress import Cell, Progress

if TYPE_CHECKING:
    from evictbench.evaluation.plan import Plan
    from evictbench.evaluation.settings import Settings
    from evictbench.sweep.local import Event

FAILURE = "failure.txt"
"""A file in the folder of a cell that failed: the traceback. It goes when the cell is done after all."""


class Executor(Protocol):
    """Does jobs: `evictbench.sweep.local.LocalWorkers`, `evictbench.sweep.ray.RayTasks`."""

    def run(self, jobs: Sequence[Job]) -> Generator[Event, None, None]:
        """Every job as it begins and ends; closing the iterator stops them in good order."""


class Watcher(Protocol):
    """Whoever shows a sweep while it goes on."""

    def warn(self, sentence: str) -> None:
        """Something the user should know."""

    def show(self, progress: Progress) -> None:
        """Time has passed, or something has happened."""

    def ended(self, cell: Cell) -> None:
        """A cell is done, has failed, or was stopped."""


@dataclass(frozen=True)
class Impossible:
    """A cell that cannot be, and why."""

    settings: Settings
    sentence: str

    @property
    def title(self) -> str:
        """Policy, budget and suite."""
        budget = "" if self.settings.budget is None else f" at {self.settings.budget}"
        return f"{self.settings.policy}{budget} on {self.settings.suite}"


def plan_cells(
    settings: Sequence[Settings], phase: Callable[[str], None] = lambda _: None
) -> tuple[list[Cell], list[Impossible]]:
    """Check and plan every cell before anything heavy starts; texts are made once for all that share them.

    A cell whose policy or budget cannot be is among the impossible ones. What is wrong with the sweep as a whole (a
    name, an option, the model, the data) raises UserError, and so does a cell that needs no budget and cannot be.
    """
    from evictbench.evaluation.checks import check

    for one in settings:
        check(one)

    def planning(number: int, text: str) -> None:
        phase(f"planning cell {number} of {len(settings)}: {text}")

    kept: Kept = {}
    cells: dict[Path, Cell] = {}
    impossible = []
    for number, one in enumerate(settings, start=1):
        try:
            plan = make_plan(one, partial(planning, number), kept)
        except UserError as error:
            if one.budget is None:
                raise
            impossible.append(Impossible(one, str(error)))
            continue
        if plan.folder not in cells:
            cells[plan.folder] = _cell(plan)
    return list(cells.values()), impossible


def sweep(cells: Sequence[Cell], executor: Executor, watch: Watcher, shards: int = 1) -> Progress:
    """Run what is not finished of every cell. A failed cell does not stop the others.

    Ctrl-C stops the executor and raises KeyboardInterrupt once everything that is finished is in its place.
    """
    progress = Progress(cells)
    for cell in cells:
        with suppress(run_folder.Held):  # the cell's worker says so, if that is still true then
            merge(cell.plan.folder, cell.plan.identity)  # shards of a sweep that was killed
        if cell.total == cell.done:
            _conclude(cell)
            watch.ended(cell)
    jobs = _jobs(cells, shards)
    open_jobs = {index: sum(job.cell == index for job in jobs) for index in range(len(cells))}
    try:
        with closing(executor.run(jobs)) as events:
            for event in events if jobs else ():
                job, ended = event or (None, None)
                if job is None:
                    progress.update()
                elif ended is None:
                    progress.started(job)
                else:
                    open_jobs[job.cell] -= 1
                    _note(cells[job.cell], ended, watch)
                    progress.ended(job)
                    if not open_jobs[job.cell]:
                        _conclude(cells[job.cell])
                        watch.ended(cells[job.cell])
                watch.show(progress)
    except KeyboardInterrupt:
        for cell in cells:
            if cell.state in ("waiting", "running"):
                _conclude(cell, stopped=True)
        raise
    return progress


def _cell(plan: Plan) -> Cell:
    there: dict[run_folder.Key, dict[str, Any]] = {}
    for folder in (plan.folder, *shard_folders(plan.folder)):
        there = {**run_folder.read_samples(folder), **there}
    cell = Cell(plan, frozenset(there.keys() & {planned.key for planned in plan.prompts}))
    cell.scores = {key: float(line["score"]) for key, line in there.items()}
    return cell


def _jobs(cells: Sequence[Cell], shards: int) -> list[Job]:
    """What is to be done, in the cells' order; folders are made, for workers to find."""
    name = uuid.uuid4().hex[:12]
    jobs = []
    for index, cell in enumerate(cells):
        missing = cell.keys - cell.finished
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


def _note(cell: Cell, ended: Ended, watch: Watcher) -> None:
    for sentence in ended.warnings:
        watch.warn(f"{cell.title}: {sentence}")
    if ended.status == "stopped" and not cell.sentence:
        cell.sentence = "Its worker was stopped."
    if ended.status == "failed" and not cell.sentence:
        cell.sentence, cell.trace = ended.sentence, ended.trace


def _conclude(cell: Cell, stopped: bool = False) -> None:
    """Merge, count what is there, write the summary; a cell is done when no sample is missing."""
    folder = cell.plan.folder
    try:
        merge(folder, cell.plan.identity)
        if (folder / run_folder.RUN).exists():
            cell.summary = run.run_plan(cell.plan, _Quiet(), only=()).summary
    except (UserError, OSError) as error:
        cell.sentence = cell.sentence or str(error)
    cell.read()
    missing = cell.total - cell.done
    if not (missing or cell.sentence or stopped):
        cell.state = "done"
        (folder / FAILURE).unlink(missing_ok=True)
    elif stopped and not cell.sentence:
        cell.state = "stopped"
        with suppress(OSError):  # one that was never begun
            folder.rmdir()
    else:
        cell.state = "failed"
        cell.sentence = cell.sentence or (
            f"{missing} of its samples are not here though its workers have ended: --out has to be on a disk that all "
            "nodes share."
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILURE).write_text(f"{cell.sentence}\n\n{cell.trace}".rstrip() + "\n")


class _Quiet:
    """Watches a run that only writes its summary."""

    def phase(self, text: str) -> None: ...
    def planned(self, plan: Plan, finished: int) -> None: ...
    def warn(self, sentence: str) -> None: ...
    def start(self, finished: Sequence[dict[str, Any]], total: int) -> None: ...
    def sample(self, line: dict[str, Any]) -> None: ...
