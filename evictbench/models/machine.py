"""The machine that a result is made on: versions, commit and device; how fast it copies memory, how much is in use."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

COPIES = 8
"""Copies of which the fastest counts."""

MOST_COPIED = {"cuda": 2**30, "cpu": 2**28}
"""Bytes of the tensor that is copied: more than any cache of the processor holds."""

LIBRARIES = ("evictbench", "torch", "transformers", "tokenizers", "lm-eval", "datasets", "numpy")


def devices_of(model: PreTrainedModel) -> list[torch.device]:
    """The devices that hold the model, that of its input first."""
    return list(dict.fromkeys([model.device, *(parameter.device for parameter in model.parameters())]))


def describe(device: torch.device) -> dict[str, Any]:
    """What measures of time depend on: processor, threads, memory in bytes."""
    import psutil
    import torch

    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that one tensor's copy reads and writes, both counted: the fastest of a few."""
    import psutil
    import torch

    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    size = max(2**20, min(MOST_COPIED[device.type], free // 8))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    times: list[float] = []
    for _ in range(COPIES):
        if on_gpu:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(device)
            began.record(stream)
            target.copy_(source)
            ended.record(stream)
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1000)
        else:
            start = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - start)
    return float(2 * size / min(times))


class Memory:
    """Memory in use: of GPUs what torch has allocated and reserved on them; on a CPU, what of the process is resident.

    peak: the most that was allocated since the last `restart`; on a CPU the most that `now` has found since.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        import psutil

        self.gpus = [device for device in devices if device.type == "cuda"]
        self._process = psutil.Process()
        self._largest = 0

    def free(self) -> None:
        """Give back what nothing uses any more, to the device or to the system."""
        import torch

        gc.collect()
        if self.gpus:
            torch.cuda.empty_cache()
        elif sys.platform == "linux":
            import contextlib
            import ctypes

            with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
                ctypes.CDLL(None).malloc_trim(0)

    def restart(self) -> None:
        """Forget the peak."""
        import torch

        self._largest = 0
        for gpu in self.gpus:
            torch.cuda.reset_peak_memory_stats(gpu)

    def now(self) -> tuple[int, int]:
        """Bytes allocated, and bytes reserved."""
        import torch

        if not self.gpus:
            resident = int(self._process.memory_info().rss)
            self._largest = max(self._largest, resident)
            return resident, resident
        found = [torch.cuda.memory_stats(gpu) for gpu in self.gpus]
        allocated, reserved = (
            sum(int(one.get(f"{name}_bytes.all.current", 0)) for one in found) for name in ("allocated", "reserved")
        )
        return allocated, reserved

    def available(self) -> int | None:
        """Bytes that a CPU's process may still take; None on GPUs, which say so themselves when they have no more. A
        system that promises more than it has would end the process instead."""
        import psutil

        return None if self.gpus else int(psutil.virtual_memory().available)

    @property
    def peak(self) -> int:
        """The most that was allocated since the last `restart`."""
        import torch

        if not self.gpus:
            return self._largest
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in self.gpus)


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was no memory left, on a GPU or for the process."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def versions() -> dict[str, str]:
    """Python's version and that of each library that can move a score; those not installed are left out."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit that evictbench runs from, with "+changes" if its files differ from it; None outside git."""
    here = Path(__file__).resolve().parent
    head = _git(here, "rev-parse", "HEAD")
    inside = _git(here, "ls-files", "--error-unmatch", "machine.py")
    if not head or not inside:
        return None
    return head + ("+changes" if _git(here.parent, "status", "--porcelain", "--untracked-files=no") else "")


def device_of(model: PreTrainedModel) -> str:
    """The devices that hold the model, in words: "cpu", "cuda: NVIDIA H200", "cuda: 2 x NVIDIA H200"."""
    import torch

    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if not all(name.startswith("cuda") for name in devices):
        return ", ".join(devices)
    kinds = {torch.cuda.get_device_name(name) for name in devices}
    count = f"{len(devices)} x " if len(devices) > 1 else ""
    return f"cuda: {count}{', '.join(sorted(kinds))}"


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
