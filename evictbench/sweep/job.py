"""One job of a sweep, a cell or a shard of one, as a worker does it: wherever it runs, its samples go to a folder."""

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

from evictbench.errors import RunFailed, UserError
from evictbench.store import run_folder
from evictbench.store.files import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.evaluation.plan import Kept, Plan
    from evictbench.evaluation.run import TextGenerator
    from evictbench.evaluation.settings import Settings

PHASE = ".phase"
"""A file in a job's folder: what its worker is doing, and which worker that is."""

ANSWERING = "answering"
"""The phase in which samples come."""


@dataclass(frozen=True)
class Job:
    """Settings of a cell, which shard of it (0 of 1: all), and where its samples go: `folder`, which is the cell's own
    or one of its shards'. sweep: whose job it is, as a name. directory: relative paths start there."""

    cell: int
    title: str
    settings: Settings
    cell_folder: Path
    folder: Path
    shard: int
    shards: int
    sweep: str
    directory: Path

    def covers(self, key: run_folder.Key) -> bool:
        """Whether a sample is of this shard: documents are dealt out by their numbers, each with all its repeats."""
        return key[1] % self.shards == self.shard


@dataclass(frozen=True)
class Ended:
    """How a job ended. stopped: by a signal, with some samples missing. sentence, trace: of a failure; the traceback
    whole. warnings: sentences. spoiled: the process is not to be trusted with another job."""

    status: Literal["done", "stopped", "failed"]
    sentence: str = ""
    trace: str = ""
    warnings: tuple[str, ...] = ()
    spoiled: bool = False


class Worker:
    """Does jobs one after another in this process. The model stays from job to job as long as they ask for the same
    one, and so do prompts."""

    def __init__(self) -> None:
        self.kept: Kept = {}
        self._key: Any = None
        self._model: PreTrainedModel | None = None

    def do(self, job: Job) -> Ended:
        """Make what is missing of a job's samples; nothing but the end of the process leaves this by an exception."""
        notes = Notes(job)
        spoiled = False
        try:
            return Ended("done" if self._run(job, notes) else "stopped", warnings=tuple(notes.warnings))
        except KeyboardInterrupt:
            return Ended("stopped", warnings=tuple(notes.warnings))
        except (UserError, RunFailed) as error:
            sentence, trace = str(error), traceback.format_exc()
        except Exception as error:  # the other cells go on
            out_of_memory = type(error).__name__ == "OutOfMemoryError"
            spoiled = not out_of_memory
            words = " ".join(str(error).split())
            kind = "Out of memory with a single row" if out_of_memory else type(error).__name__
            sentence = f"{kind}: {words}"
            trace = traceback.format_exc()
        finally:
            notes.close()
            _free_memory()
        return Ended("failed", sentence, trace, tuple(notes.warnings), spoiled)

    def load(self, plan: Plan) -> PreTrainedModel:
        """The model of a plan: the one that is here, or loaded in its place."""
        from evictbench.evaluation import run

        settings = plan.settings
        key = (plan.source, plan.dtype, settings.device, settings.trust_remote_code)
        if self._model is None or key != self._key:
            self._model = None
            _free_memory()
            self._model = run.load_model(plan)
            self._key = key
        return self._model

    def _run(self, job: Job, notes: Notes) -> bool:
        from evictbench.evaluation import run
        from evictbench.evaluation.plan import make_plan

        _enter(job)
        notes.phase("planning")
        plan = make_plan(job.settings, notes.phase, self.kept)
        if plan.folder != job.cell_folder:
            raise UserError(
                f"This worker ({socket.gethostname()}) makes {plan.folder.name} of a cell that was planned as "
                f"{job.cell_folder.name}: evictbench, its libraries or the data are not the same everywhere."
            )
        keys = {planned.key for planned in plan.prompts if job.covers(planned.key)}
        if job.folder != job.cell_folder:
            keys -= run_folder.read_samples(job.cell_folder).keys()

        def make(plan: Plan) -> tuple[TextGenerator, str]:
            return run.load_generator(plan, self.load)

        outcome = run.run_plan(replace(plan, folder=job.folder), notes, make, keys)
        return not outcome.interrupted


@dataclass
class Notes:
    """Watches a job (`evictbench.evaluation.run.Watcher`): keeps its warnings, and writes what goes on into its
    folder."""

    job: Job
    warnings: list[str] = field(default_factory=list)

    def phase(self, text: str) -> None:
        """Write it down for whoever shows the sweep."""
        note = {"sweep": self.job.sweep, "phase": text, "pid": os.getpid(), "host": socket.gethostname()}
        write_json(self.job.folder / PHASE, note)

    def planned(self, plan: Plan, finished: int) -> None:
        """Nothing."""

    def warn(self, sentence: str) -> None:
        """Keep it, once."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def start(self, finished: Sequence[dict[str, Any]], total: int) -> None:
        """Samples come from now on."""
        self.phase(ANSWERING)

    def sample(self, line: dict[str, Any]) -> None:
        """Nothing: the sample is on the disk, where it is seen."""

    def close(self) -> None:
        """Take the note away."""
        (self.job.folder / PHASE).unlink(missing_ok=True)


def read_phase(folder: Path, sweep: str) -> dict[str, Any] | None:
    """What the worker of a job is doing; None where none of this sweep is at it."""
    try:
        note = json.loads((folder / PHASE).read_text())
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) and note.get("sweep") == sweep else None


def _enter(job: Job) -> None:
    """Go where the sweep was started, and see that its folder is there: who planned the job has made it."""
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
        with suppress(RuntimeError):  # of a device that has failed; the next job would say so
            torch.cuda.empty_cache()
