"""Jobs of a sweep on a Ray cluster: each job is a task with its own GPUs, started again if its worker is lost.

`RAY_ADDRESS` names the cluster ("auto": the one that runs on this node); without it one is started on this machine.
The results folder has to be on a disk that all nodes share: samples go there, and a task that is started again goes on
from them. Ray ends the process of a GPU task with the task, to free the GPU, so there each job loads the model.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Generator, Sequence
from typing import Any

from evictbench.errors import UserError, first_line, one_line
from evictbench.sweep.job import Job, JobResult, Worker, read_phase
from evictbench.sweep.local import PATIENCE, TICK, Event

RETRIES = 3
"""How often a job is started again after its worker was lost."""

REACHED_WITHIN = 5.0
"""Seconds within which a cluster's address has to answer."""


class RayTasks:
    """Runs jobs as Ray tasks. gpus: the number for each; None for one where the cluster has any. Raises UserError where
    Ray is not installed, and where nothing answers at the cluster's address."""

    def __init__(self, gpus: float | None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UserError("--executor ray needs Ray, which is not installed: pip install 'evictbench[ray]'.")
        check_address(os.environ.get("RAY_ADDRESS", ""))
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


def check_address(address: str, timeout: float = REACHED_WITHIN) -> None:
    """Raise UserError where nothing listens at "host:port" or "ray://host:port"; Ray itself tries for minutes, and logs
    each try. Other addresses ("auto") are left to Ray. timeout: seconds; name resolution, which knows no limit of its
    own, is given up on too."""
    place = re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:([0-9]{1,5})", address)
    if place is None:
        return
    host, port = place[1], int(place[2])
    answer = [f"no answer within {timeout:g} seconds"]

    def ask() -> None:
        try:
            socket.create_connection((host, port), timeout=timeout).close()
            answer[0] = ""
        except (OSError, OverflowError) as error:
            answer[0] = getattr(error, "strerror", None) or first_line(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    if answer[0]:
        raise UserError(
            f"No Ray cluster answers at RAY_ADDRESS={address} ({answer[0]}): start it, name another, or unset "
            "RAY_ADDRESS to start one on this machine."
        )


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

    check_address(os.environ.get("RAY_ADDRESS", ""))
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
