"""One job of a sweep, a cell or a shard of one, as a worker does it. Wherever it runs, its samples go to a folder."""

from __future__ import annotations

import gc
import json
import os
import socket
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evictbench.errors import RunFailed, UserError, one_line
from evictbench.store import run_folder
from evictbench.store.files import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.evaluation.plan import RunPlan, SharedInputs
    from evictbench.evaluation.run import TextGenerator
    from evictbench.evaluation.settings import RunSettings

PHASE = ".phase"
"""A file in a job's folder that says what its worker is doing, and which worker that is."""

ANSWERING = "answering"
"""The phase in which samples are made."""


@dataclass(frozen=True)
class Job:
    """A cell, or a shard of it, to be run by one worker.

    cell: the cell's index in the sweep. title: for sentences. settings: the cell's. folder: where the samples go, which
    is cell_folder or the folder of a shard. shard, shards: which part of the cell this is; 0 of 1 is all of it.
    sweep: the name of the sweep that made the job. directory: where relative paths start.
    """

    cell: int
    title: str
    settings: RunSettings
    cell_folder: Path
    folder: Path
    shard: int
    shards: int
    sweep: str
    directory: Path

    def covers(self, key: run_folder.Key) -> bool:
        """Whether a sample belongs to this job. Documents are dealt out by number, each with all its repeats."""
        return key[1] % self.shards == self.shard


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    status: "stopped" if a signal came before every sample was finished. sentence, trace: the error of a failed job, and
    its traceback. warnings: sentences. spoiled: the process must not be given another job.
    """

    status: Literal["done", "stopped", "failed"]
    sentence: str = ""
    trace: str = ""
    warnings: tuple[str, ...] = ()
    spoiled: bool = False


class Worker:
    """Does jobs one after another in this process. The model and the prompts are kept for jobs that use the same."""

    def __init__(self) -> None:
        self._shared: SharedInputs = {}
        self._key: Any = None
        self._model: PreTrainedModel | None = None

    def do(self, job: Job) -> JobResult:
        """Make the missing samples of a job. An error becomes a result; no exception leaves this method."""
        watcher = JobWatcher(job)
        spoiled = False
        try:
            return JobResult("done" if self._run(job, watcher) else "stopped", warnings=tuple(watcher.warnings))
        except KeyboardInterrupt:
            return JobResult("stopped", warnings=tuple(watcher.warnings))
        except (UserError, RunFailed) as error:
            sentence, trace = str(error), traceback.format_exc()
        except Exception as error:  # the other cells go on
            out_of_memory = type(error).__name__ == "OutOfMemoryError"
            spoiled = not out_of_memory
            kind = "Out of memory with a single row" if out_of_memory else type(error).__name__
            sentence = f"{kind}: {one_line(error)}"
            trace = traceback.format_exc()
        finally:
            watcher.close()
            _free_memory()
        return JobResult("failed", sentence, trace, tuple(watcher.warnings), spoiled)

    def load(self, plan: RunPlan) -> PreTrainedModel:
        """The model of a plan: the one that this worker holds, or another loaded in its place."""
        from evictbench.evaluation import run

        settings = plan.settings
        weights = plan.fingerprint["weights"]
        key = (plan.source, weights, plan.dtype, settings.device, settings.trust_remote_code)
        if self._model is None or key != self._key:
            self._model = None
            _free_memory()
            self._model = run.load_model(plan)
            self._key = key
        return self._model

    def _run(self, job: Job, watcher: JobWatcher) -> bool:
        """Run a job; whether it came to its end."""
        from evictbench.evaluation import run
        from evictbench.evaluation.plan import make_plan

        _enter(job)
        watcher.phase("planning")
        plan = make_plan(job.settings, watcher.phase, self._shared)
        if plan.folder != job.cell_folder:
            raise UserError(
                f"This worker ({socket.gethostname()}) makes {plan.folder.name} of a cell that was planned as "
                f"{job.cell_folder.name}: evictbench, its libraries or the data are not the same everywhere."
            )
        keys = {planned.key for planned in plan.prompts if job.covers(planned.key)}
        if job.folder != job.cell_folder:
            keys -= run_folder.read_samples(job.cell_folder).keys()

        def make(plan: RunPlan) -> tuple[TextGenerator, str]:
            return run.load_generator(plan, self.load)

        outcome = run.run_plan(replace(plan, folder=job.folder), watcher, make, keys)
        return not outcome.interrupted


@dataclass
class JobWatcher:
    """Follows a job's run (`evictbench.evaluation.run.Watcher`): keeps its warnings, and writes its phase to a file in
    its folder."""

    job: Job
    warnings: list[str] = field(default_factory=list)

    def phase(self, text: str) -> None:
        """Write the phase down, for the process that shows the sweep."""
        note = {"sweep": self.job.sweep, "phase": text, "pid": os.getpid(), "host": socket.gethostname()}
        write_json(self.job.folder / PHASE, note)

    def planned(self, plan: RunPlan, finished: int) -> None:
        """Nothing to do."""

    def warn(self, sentence: str) -> None:
        """Keep the warning, once."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def start(self, finished: Sequence[dict[str, Any]], total: int) -> None:
        """Samples are made from now on."""
        self.phase(ANSWERING)

    def sample(self, line: dict[str, Any]) -> None:
        """Nothing to do: progress is read from the samples on the disk."""

    def close(self) -> None:
        """Remove the file."""
        (self.job.folder / PHASE).unlink(missing_ok=True)


def read_phase(folder: Path, sweep: str) -> dict[str, Any] | None:
    """What a job's worker has written about its phase; None where no worker of this sweep is at the job."""
    try:
        note = json.loads((folder / PHASE).read_text())
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) and note.get("sweep") == sweep else None


def _enter(job: Job) -> None:
    """Change to the directory where the sweep was started, and check that the job's folder, made there, is visible."""
    if Path.cwd() != job.directory and job.directory.is_dir():
        os.chdir(job.directory)
    if not job.folder.is_dir():
        raise UserError(
            f"{socket.gethostname()} does not see the folder {job.folder}: --out has to be on a disk that all nodes "
            "share."
        )


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # the device has failed; the next job will report it
            torch.cuda.empty_cache()
