"""From sample lines to one row per task and one for the suite: scores with intervals, memory, time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from evictbench.stats import mean_interval, mean_of_tasks

Line = Mapping[str, Any]

MEANS = (
    "occupancy_mean",
    "cache_bytes",
    "prefill_peak_bytes",
    "prefill_seconds",
    "first_token_seconds",
    "decode_seconds",
    "prompt_tokens",
    "output_tokens",
)
"""Columns that are the mean over samples of what each line holds, under the same name."""


def summarise(lines: Iterable[Line], asked: Mapping[str, int]) -> dict[str, Any]:
    """One row per task of `asked` (task: samples asked for) and, under "mean", the unweighted mean over tasks.

    Scores are in [0, 1], sizes in bytes per sample, times in seconds per sample, `decode_tokens_per_second` over all
    rows together and without the first token. Shares (`truncated`, `repetition`) are in [0, 1].
    """
    by_task: dict[str, list[Line]] = {}
    for line in lines:
        by_task.setdefault(line["task"], []).append(line)
    rows = {name: _row(by_task[name], wanted) for name, wanted in asked.items() if name in by_task}
    if not rows:
        return {"tasks": {}, "mean": None}
    scores = {name: [line["score"] for line in by_task[name]] for name in rows}
    mean, interval = mean_of_tasks(scores)
    whole = {name: fmean(row[name] for row in rows.values()) for name in (*MEANS, "truncated", "repetition")}
    every = [line for name in rows for line in by_task[name]]
    return {
        "tasks": rows,
        "mean": {
            "score": mean,
            "interval": interval,
            "samples": len(every),
            "asked": sum(max(wanted, len(by_task.get(name, ()))) for name, wanted in asked.items()),
            "occupancy_max": max(row["occupancy_max"] for row in rows.values()),
            **whole,
            "decode_tokens_per_second": tokens_per_second(every),
        },
    }


def tokens_per_second(lines: Iterable[Line]) -> float | None:
    """Tokens decoded per second of decoding, the first token of each answer (prefill made it) left out."""
    steps = seconds = 0.0
    for line in lines:
        steps += line["decode_steps"]
        seconds += line["decode_seconds"]
    return steps / seconds if seconds > 0 else None


def repeats_itself(tokens: Sequence[int], longest: int = 64) -> bool:
    """Whether an answer ends in a loop: its last 32 tokens or more are at least four turns of one block."""
    for block in range(1, longest + 1):
        tail = max(32, 4 * block)
        if tail > len(tokens):
            return False
        end = tokens[-tail:]
        if all(end[i] == end[i - block] for i in range(block, tail)):
            return True
    return False


def _row(lines: Sequence[Line], asked: int) -> dict[str, Any]:
    scores = [line["score"] for line in lines]
    return {
        "score": fmean(scores),
        "interval": mean_interval(scores),
        "samples": len(lines),
        "asked": max(asked, len(lines)),
        "occupancy_max": max(line["occupancy_max"] for line in lines),
        **{name: fmean(line[name] for line in lines) for name in MEANS},
        "truncated": fmean(line["truncated"] for line in lines),
        "repetition": fmean(line["repetition"] for line in lines),
        "decode_tokens_per_second": tokens_per_second(lines),
    }
