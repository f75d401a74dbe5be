"""Jobs of a sweep on a Ray cluster: each job is a task with its own GPUs, started again if its worker is lost.

`RAY_ADDRESS` names the cluster ("auto": the one that runs on this node); without it one is started on this machine.
The results folder has to be on a disk that all nodes share: samples go there, and a task that is started again goes on
from them. Ray ends the process of a GPU task with the task, to free the GPU, so there each job loads the model.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
from collections.abc import Generator, Sequence
from typing import Any

from evictbench.errors import UserError, one_line
from evictbench.sweep.job import Job, JobResult, Worker, read_phase
from evictbench.sweep.local import PATIENCE, TICK, Event

RETRIES = 3
"""How often a job is started again after its worker was lost."""


class RayTasks:
    """Runs jobs as Ray tasks. gpus: the number for each; None for one where the cluster has any. Raises UserError where
    Ray is not installed."""

    def __init__(self, gpus: float | None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UserError("--executor ray needs Ray, which is not installed: pip install 'evictbench[ray]'.")
        self.gpus = gpus

    def run(self, jobs: Sequence[Job]) -> Generator[Event, None, None]:
        """Do all jobs, and report when each begins and ends. Closing the iterator stops the tasks after their current
        step."""
        import ray

        started_here = not ray.is_initialized()
        if started_here:
            _connect()
        gpus = self.gpus
        if gpus is None:
            gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(do_in_task)
        tasks = {task.options(name=job.title).remote(job): job for job in jobs}
        begun: set[Job] = set()
        try:
            while tasks:
                ready, _ = ray.wait(list(tasks), timeout=TICK)
                for job in tasks.values():
                    if job not in begun and read_phase(job.folder, job.sweep):
                        begun.add(job)
                        yield job, None
                for done in ready:
                    yield tasks.pop(done), _result(done)
                yield None
        finally:
            for running in tasks:
                ray.cancel(running)
            if tasks:
                ray.wait(list(tasks), num_returns=len(tasks), timeout=PATIENCE)
            if started_here:
                ray.shutdown()


def do_in_task(job: Job) -> JobResult:
    """Do one job in a Ray task. The worker is kept for later tasks of the same process."""
    global _worker
    if _worker is None:
        from evictbench.terminal.console import silence_libraries

        silence_libraries()
        _worker = Worker()
    return _worker.do(job)


_worker: Worker | None = None


def _connect() -> None:
    """Connect to the cluster, or start one. Raises UserError if that fails."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    terminated = signal.getsignal(signal.SIGTERM)  # Ray puts a handler of its own in its place
    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(**quiet)
        else:
            ray.init(include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"Ray cannot be reached or started: {one_line(error)}") from error
    finally:
        signal.signal(signal.SIGTERM, terminated)


def _result(done: object) -> JobResult:
    """The result of a task that has ended, or of its loss."""
    import ray

    try:
        ended: JobResult = ray.get(done)
    except (
        ray.exceptions.RayTaskError
    ) as error:  # raised before the job: evictbench may be missing there, or another version
        last = str(error).strip().splitlines()[-1]
        return JobResult("failed", f"A node of the cluster could not begin it: {last}", str(error))
    except ray.exceptions.RayError as error:
        return JobResult("failed", f"Its Ray worker was lost {RETRIES + 1} times: {one_line(error)}", str(error))
    return ended
