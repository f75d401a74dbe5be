"""`python -m benchmarks.subset_law`: what the log-partition of DistillCache's law costs, forward and backward.

L = 4,096 scores and B = 1,024 chosen, the largest that the paper trains on; beside it, the last step of a decode, one
dropped of 1,025, for a batch of rows. Seconds: the median of the repeats. Memory: the most that is held at once beyond
the scores themselves, from torch's own count on CUDA, and on a CPU from the profiler's list of what is taken and given
back, in a run of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from evictbench.policies.distillcache.subset import conditional_poisson, log_partition


def peak_bytes(scores: Tensor, size: int, backward: bool) -> int:
    """Bytes held at once beyond the scores, at the most."""

    def work() -> None:
        leaf = scores.detach().requires_grad_(backward)
        value = log_partition(leaf, size).sum()
        if backward:
            value.backward()  # type: ignore[no-untyped-call]

    if scores.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(scores.device)
        before = torch.cuda.memory_allocated(scores.device)
        work()
        torch.cuda.synchronize(scores.device)
        return torch.cuda.max_memory_allocated(scores.device) - before
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    held = most = 0
    profiled: Any = profiler.profiler
    memory = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda change: change.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def seconds(scores: Tensor, size: int, repeats: int) -> dict[str, float]:
    """Medians of forward, backward and one draw."""
    times_by_part: dict[str, list[float]] = {"forward": [], "backward": [], "draw": []}
    generator = torch.Generator(scores.device).manual_seed(0)

    def now() -> float:
        if scores.device.type == "cuda":
            torch.cuda.synchronize(scores.device)
        return time.perf_counter()

    for _ in range(repeats):
        leaf = scores.detach().requires_grad_()
        began = now()
        value = log_partition(leaf, size).sum()
        forward = now()
        value.backward()  # type: ignore[no-untyped-call]
        backward = now()
        conditional_poisson(scores, size, generator)
        drawn = now()
        for name, begin, end in (
            ("forward", began, forward),
            ("backward", forward, backward),
            ("draw", backward, drawn),
        ):
            times_by_part[name].append(end - begin)
    return {name: statistics.median(times) for name, times in times_by_part.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.subset_law", description=__doc__)
    parser.add_argument("--length", type=int, default=4096, help="L, scores")
    parser.add_argument("--size", type=int, default=1024, help="B, chosen")
    parser.add_argument("--rows", type=int, default=8, help="rows of the decode step beside it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    console = Console()
    cases = [(1, options.length, options.size), (options.rows, options.size + 1, options.size)]
    table = Table(
        *("rows", "L", "B", "forward s", "backward s", "draw s", "forward MB", "backward MB"),
        title=f"log-partition, {options.device}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{platform.machine()}",
    )
    measured = []
    for rows, length, size in cases:
        scores = torch.randn(rows, length, generator=torch.Generator().manual_seed(0)).to(options.device)
        numbers: dict[str, Any] = {"rows": rows, "length": length, "size": size}
        numbers |= seconds(scores, size, options.repeats)
        numbers |= {
            name: peak_bytes(scores, size, backward)
            for name, backward in (("forward_bytes", False), ("backward_bytes", True))
        }
        measured.append(numbers)
        megabytes = [f"{numbers[name] / 1e6:.2f}" for name in ("forward_bytes", "backward_bytes")]
        times = [f"{numbers[name]:.4f}" for name in ("forward", "backward", "draw")]
        table.add_row(str(rows), str(length), str(size), *times, *megabytes)
    console.print(table)
    if options.out:
        options.out.write_text(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
