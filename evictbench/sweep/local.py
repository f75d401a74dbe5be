"""Jobs of a sweep on this machine: a worker process on each device, jobs handed out from one queue."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.sweep.job import Job, JobResult, Worker

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

Event = tuple[Job, JobResult | None] | None
"""A job that has begun (with None) or ended (with its result); None when nothing has happened for a while."""

TICK = 0.5
"""Seconds after which an executor reports that nothing has happened."""

OF_A_TERMINAL = {signal.SIGINT, signal.SIGHUP}
"""Signals that Ctrl-C and the closing of a terminal send to all processes on it."""

PATIENCE = 30.0
"""Seconds that workers have to write their summaries once they are asked to stop."""


@dataclass(frozen=True)
class WorkerDevice:
    """Where one worker runs. device: `--device` of its jobs. environment: variables that show it its own GPUs alone."""

    device: str
    environment: Mapping[str, str] = field(default_factory=dict)


def worker_devices(device: str, gpus_per_cell: int = 1) -> list[WorkerDevice]:
    """The devices of this machine's workers.

    device: "auto" (all GPUs, or the CPU where there are none), a comma list of GPUs ("cuda:0,cuda:2"), or one device
    for a single worker. gpus_per_cell: GPUs of each worker. Raises UserError where the machine does not have them.
    """
    import torch

    from evictbench.models.devices import SPREAD, check_device

    names = [name.strip() for name in device.split(",") if name.strip()] or ["auto"]
    for name in names:
        check_device(name)
    if names == ["auto"]:
        names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    if not all(name.startswith("cuda:") for name in names):
        if len(names) > 1:
            raise UserError(f"--device {device}: of several devices each has to be a GPU, as in cuda:0,cuda:1.")
        if gpus_per_cell > 1 and names[0] not in SPREAD:
            raise UserError(f"--gpus-per-cell {gpus_per_cell} needs GPUs, and the device is {names[0]}.")
        return [WorkerDevice(names[0])]
    if len(set(names)) < len(names):
        raise UserError(f"--device {device} names a GPU twice.")
    if gpus_per_cell > len(names):
        raise UserError(f"--gpus-per-cell {gpus_per_cell} is more than there are: {len(names)} GPU(s).")
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    ids = [visible[index] if visible else str(index) for index in (int(name.split(":")[1]) for name in names)]
    groups = [ids[start : start + gpus_per_cell] for start in range(0, len(ids), gpus_per_cell)]
    return [
        WorkerDevice("auto", {"CUDA_VISIBLE_DEVICES": ",".join(group)})
        for group in groups
        if len(group) == gpus_per_cell
    ]


class LocalWorkers:
    """Runs jobs on this machine, one worker process on each of `devices`."""

    def __init__(self, devices: Sequence[WorkerDevice]) -> None:
        self.devices = devices

    def run(self, jobs: Sequence[Job]) -> Generator[Event, None, None]:
        """Do all jobs, and report when each begins and ends. Closing the iterator stops the workers after their current
        step; their finished samples and summaries are on the disk by then."""
        waiting = deque(jobs)
        workers = [_Process(device) for device in self.devices[: len(jobs)]]
        try:
            while waiting or any(worker.job for worker in workers):
                for worker in workers:
                    if waiting and worker.job is None:
                        job = waiting.popleft()
                        worker.begin(job)
                        yield job, None
                busy: dict[object, _Process] = {worker.pipe: worker for worker in workers if worker.job}
                for pipe in wait([worker.pipe for worker in workers if worker.job], timeout=TICK):
                    yield busy[pipe].end()
                yield None
        finally:
            for worker in workers:
                worker.ask_to_stop()
            for worker in workers:
                worker.stop()


class _Process:
    """A worker process on a device. It is started with its first job, and again if it has died."""

    def __init__(self, device: WorkerDevice) -> None:
        self.device = device
        self.job: Job | None = None
        self.process: SpawnProcess | None = None
        self.pipe: Connection

    def begin(self, job: Job) -> None:
        """Give the process a job."""
        if self.process is None:
            self._start()
        self.job = job
        with suppress(OSError):  # it has died while idle; `end` will notice
            self.pipe.send(job)

    def end(self) -> tuple[Job, JobResult]:
        """The job and its result, once something has come through the pipe."""
        assert self.process is not None
        assert self.job is not None
        job, self.job = self.job, None
        try:
            ended = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            code = self.process.exitcode
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
            ended = JobResult("failed", f"The worker process {how} (signal 9 often is the system, out of memory).")
            self.process = None
        else:
            if ended.spoiled:
                self.ask_to_stop()
                self.stop()
        return job, ended

    def ask_to_stop(self) -> None:
        """Interrupt the job."""
        if self.process is not None and self.process.is_alive():
            self.process.terminate()

    def stop(self) -> None:
        """Wait for the process to end, then kill it."""
        if self.process is None:
            return
        try:
            self.process.join(PATIENCE)
        finally:  # a second Ctrl-C ends the wait
            self.process.kill()
            self.process.join()
        self.process = None
        self.pipe.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, dict(self.device.environment)), daemon=True)
        # These reach every process of a terminal; only the process that shows the sweep may act on them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_TERMINAL)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other.close()


def _serve(pipe: Connection, environment: Mapping[str, str]) -> None:
    """The main loop of a worker process: jobs come through the pipe, and their results go back."""
    os.environ.update(environment)
    for number in OF_A_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # does to a run what Ctrl-C does
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_A_TERMINAL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from evictbench.terminal.console import silence_libraries

    silence_libraries()
    worker = Worker()
    with suppress(KeyboardInterrupt, EOFError, OSError):
        while True:
            job = pipe.recv()
            pipe.send(worker.do(job))


def _end_with_parent() -> None:
    """End this process when its parent has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
