"""The machine that a result is made on: versions, commit, devices, the speed of its memory, and how much is in use."""

from __future__ import annotations

import contextlib
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

LIBRARIES = ("evictbench", "torch", "transformers", "tokenizers", "lm-eval", "datasets", "numpy")
"""Libraries whose versions a result states."""

COPIES = 8
"""Copies of which the fastest counts."""

MOST_COPIED = {"cuda": 2**30, "cpu": 2**28}
"""Bytes of the tensor that is copied, by device type: more than any cache of the processor holds."""


def versions() -> dict[str, str]:
    """The version of Python and of each library that can change a score; those not installed are left out."""
    installed = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def commit() -> str | None:
    """The commit that evictbench runs from, with "+changes" if tracked files differ from it; None outside git."""
    here = Path(__file__).resolve().parent
    head = _git(here, "rev-parse", "HEAD")
    inside = _git(here, "ls-files", "--error-unmatch", "machine.py")
    if not head or not inside:
        return None
    return head + ("+changes" if _git(here.parent, "status", "--porcelain", "--untracked-files=no") else "")


def device_names(model: PreTrainedModel) -> str:
    """The devices that hold the model, as results name them: "cpu", "cuda: NVIDIA H200", "cuda: 2 x NVIDIA H200"."""
    import torch

    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if not all(name.startswith("cuda") for name in devices):
        return ", ".join(devices)
    kinds = {torch.cuda.get_device_name(name) for name in devices}
    count = f"{len(devices)} x " if len(devices) > 1 else ""
    return f"cuda: {count}{', '.join(sorted(kinds))}"


def model_devices(model: PreTrainedModel) -> list[torch.device]:
    """The devices that hold the model, the one that takes its input first."""
    return list(dict.fromkeys([model.device, *(parameter.device for parameter in model.parameters())]))


def hardware(device: torch.device) -> dict[str, Any]:
    """The parts of a machine that times depend on: processor, threads, memory in bytes. device: that of the model."""
    import psutil
    import torch

    parts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        parts |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return parts


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of copying one tensor, those read and those written both counted; the fastest of `COPIES`."""
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


class MemoryUsage:
    """Memory in use: what torch has allocated and reserved on GPUs, or the resident memory of the process on a CPU."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        import psutil

        self.gpus = [device for device in devices if device.type == "cuda"]
        self._process = psutil.Process()
        self._largest = 0

    def release_unused(self) -> None:
        """Give memory that nothing uses any more back to the device or the system."""
        import torch

        gc.collect()
        if self.gpus:
            torch.cuda.empty_cache()
        elif sys.platform == "linux":
            import ctypes

            with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
                ctypes.CDLL(None).malloc_trim(0)

    def reset_peak(self) -> None:
        """Begin a new peak."""
        import torch

        self._largest = 0
        for gpu in self.gpus:
            torch.cuda.reset_peak_memory_stats(gpu)

    def current(self) -> tuple[int, int]:
        """Bytes allocated, and bytes reserved."""
        import torch

        if not self.gpus:
            resident = int(self._process.memory_info().rss)
            self._largest = max(self._largest, resident)
            return resident, resident
        stats = [torch.cuda.memory_stats(gpu) for gpu in self.gpus]
        allocated, reserved = (
            sum(int(gpu.get(f"{name}_bytes.all.current", 0)) for gpu in stats) for name in ("allocated", "reserved")
        )
        return allocated, reserved

    def available(self) -> int | None:
        """Bytes that the process may still take on a CPU, where a system that overcommits would kill it; None on GPUs,
        where torch raises an error when there is no more."""
        import psutil

        return None if self.gpus else int(psutil.virtual_memory().available)

    @property
    def peak(self) -> int:
        """The most bytes allocated since the last `reset_peak`; on a CPU the most that `current` has returned since."""
        import torch

        if not self.gpus:
            return self._largest
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in self.gpus)


def _processor() -> str:
    """The processor's name, as far as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
