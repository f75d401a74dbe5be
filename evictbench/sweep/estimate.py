"""What a cell will take: tokens, cache memory, time; for `evictbench sweep --dry-run`. Nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.models import load
from evictbench.policy.step import ModelShape
from evictbench.store import run_folder

if TYPE_CHECKING:
    from evictbench.evaluation.plan import Plan
    from evictbench.sweep.progress import Cell

PROMPT_RATE, ANSWER_RATE = 1000.0, 20.0
"""Tokens a second that are assumed where nothing is measured."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Estimate:
    """Of what is missing of a cell.

    answer_tokens: at most. cache_bytes: the decode cache with all its rows filled. prompt_bytes: the cache of one
    prompt at its fullest. seconds, of one worker, weights not counted; timed_by: what they come from, in words.
    """

    samples: int
    prompt_tokens: int
    answer_tokens: int
    cache_bytes: int
    prompt_bytes: int
    seconds: float
    timed_by: str


@dataclass(frozen=True)
class Measured:
    """A cell that was run: the sums over its samples."""

    folder: Path
    model: str
    policy: str
    suite: str
    samples: int
    prompt_tokens: float
    output_tokens: float
    prefill_seconds: float
    decode_seconds: float


def estimate(cells: Sequence[Cell], out: Path) -> list[Estimate]:
    """An estimate of each cell; times from the samples that are in the results folder, where there are any."""
    measured = list(_measured(out))
    return [_of(cell, measured) for cell in cells]


def _of(cell: Cell, measured: Sequence[Measured]) -> Estimate:
    plan = cell.plan
    missing = [planned for planned in plan.prompts if planned.key not in cell.finished]
    prompt_tokens = sum(len(planned.prompt.ids) for planned in missing)
    answer_tokens = sum(planned.max_new_tokens for planned in missing)
    rows = min(plan.settings.batch_size, len(missing))
    token = _token_bytes(plan)
    seconds, timed_by = _time(cell, len(missing), prompt_tokens, answer_tokens, measured)
    return Estimate(
        samples=len(missing),
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        cache_bytes=rows * token * max((_held(plan, planned)[0] for planned in missing), default=0),
        prompt_bytes=token * max((_held(plan, planned)[1] for planned in missing), default=0),
        seconds=seconds,
        timed_by=timed_by,
    )


def _token_bytes(plan: Plan) -> int:
    """Keys and values of one token in all layers and KV heads."""
    shape = ModelShape.of(load.load_config(plan.source, plan.settings.trust_remote_code))
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPE_BYTES.get(plan.dtype, 4)


def _held(plan: Plan, planned: Any) -> tuple[int, int]:
    """Entries per KV head that a sample's cache holds at its end, and at the fullest moment of its prompt."""
    budget = plan.checked.budget
    length = len(planned.prompt.ids)
    seen = length + planned.max_new_tokens
    if budget is None:
        return seen, length
    mode = plan.policy.prefill if plan.settings.prefill == "native" else plan.settings.prefill
    at_prompt = budget.at(planned.compressible, length)
    fullest = length if mode == "dense" else min(length, at_prompt + plan.settings.chunk)
    return min(seen, budget.at(planned.compressible, seen)), fullest


def _time(
    cell: Cell, samples: int, prompt_tokens: int, answer_tokens: int, measured: Sequence[Measured]
) -> tuple[float, str]:
    """Seconds, and where they come from: the nearest samples that there are."""
    alike = [one for one in measured if one.model == cell.plan.model]
    answers = [one for one in alike if one.suite == cell.suite]
    if answers:
        answer_tokens = round(samples * _sum(answers, "output_tokens") / _sum(answers, "samples"))
    for found, words in (
        ([one for one in alike if one.folder == cell.plan.folder], "its own samples"),
        ([one for one in alike if one.policy == cell.policy], "the policy's other samples"),
        (alike, "the model's other samples"),
    ):
        prefill, decode = _sum(found, "prefill_seconds"), _sum(found, "decode_seconds")
        if prefill > 0 and decode > 0:
            prompt_rate = _sum(found, "prompt_tokens") / prefill
            answer_rate = max(_sum(found, "output_tokens"), 1) / decode
            return prompt_tokens / prompt_rate + answer_tokens / answer_rate, words
    assumed = f"{PROMPT_RATE:,.0f} prompt and {ANSWER_RATE:g} answer tokens a second, assumed"
    return prompt_tokens / PROMPT_RATE + answer_tokens / ANSWER_RATE, assumed


def _measured(out: Path) -> Iterable[Measured]:
    for file in sorted(out.glob(f"*/*/*/{run_folder.SUMMARY}")):
        try:
            summary = json.loads(file.read_text())
            identity, mean = summary["identity"], summary["mean"]
            if mean is None:
                continue
            count = mean["samples"]
            yield Measured(
                folder=file.parent,
                model=identity["model"],
                policy=identity["policy"]["label"],
                suite=identity["suite"],
                samples=count,
                prompt_tokens=count * mean["prompt_tokens"],
                output_tokens=count * mean["output_tokens"],
                prefill_seconds=count * mean["prefill_seconds"],
                decode_seconds=count * mean["decode_seconds"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half-written or foreign: nothing to estimate from


def _sum(found: Iterable[Measured], name: str) -> float:
    return sum(float(getattr(one, name)) for one in found)
