"""An estimate of what a cell takes: tokens, cache memory, time. For `evictbench sweep --dry-run`; loads no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.models import load
from evictbench.policy.step import ModelShape
from evictbench.store import run_folder
from evictbench.store.records import Summary, checked, read_object

if TYPE_CHECKING:
    from evictbench.evaluation.plan import RunPlan
    from evictbench.evaluation.prompts import PlannedSample
    from evictbench.sweep.progress import SweepCell

PROMPT_RATE, ANSWER_RATE = 1000.0, 20.0
"""Tokens a second, assumed where nothing has been measured."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Estimate:
    """What the unfinished samples of a cell will take.

    answer_tokens: the most there can be. cache_bytes: the decode cache with all its rows filled. prompt_bytes: the
    cache of one prompt at its fullest. seconds: of one worker, without loading weights. timed_by: what the time is
    derived from, in words.
    """

    samples: int
    prompt_tokens: int
    answer_tokens: int
    cache_bytes: int
    prompt_bytes: int
    seconds: float
    timed_by: str


@dataclass(frozen=True)
class MeasuredCell:
    """A cell that has been run. Tokens and seconds are sums over its samples."""

    folder: Path
    model: str
    policy: str
    suite: str
    samples: int
    prompt_tokens: float
    output_tokens: float
    prefill_seconds: float
    decode_seconds: float


def estimate(cells: Sequence[SweepCell], out: Path) -> list[Estimate]:
    """An estimate of each cell. Times come from the samples in the results folder `out`, where there are any."""
    measured = list(_measured_cells(out))
    return [_estimate(cell, measured) for cell in cells]


def _estimate(cell: SweepCell, measured: Sequence[MeasuredCell]) -> Estimate:
    plan = cell.plan
    missing = [planned for planned in plan.prompts if planned.key not in cell.finished]
    prompt_tokens = sum(len(planned.prompt.ids) for planned in missing)
    answer_tokens = sum(planned.max_new_tokens for planned in missing)
    rows = min(plan.settings.batch_size, len(missing))
    token_bytes = _token_bytes(plan)
    seconds, timed_by = _time(cell, len(missing), prompt_tokens, answer_tokens, measured)
    return Estimate(
        samples=len(missing),
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        cache_bytes=rows * token_bytes * max((_entries(plan, planned)[0] for planned in missing), default=0),
        prompt_bytes=token_bytes * max((_entries(plan, planned)[1] for planned in missing), default=0),
        seconds=seconds,
        timed_by=timed_by,
    )


def _token_bytes(plan: RunPlan) -> int:
    """Bytes of the keys and values of one token in all layers and KV heads."""
    shape = ModelShape.of(load.load_config(plan.source, plan.settings.trust_remote_code))
    return shape.layers * shape.kv_heads * shape.entry_numbers * DTYPE_BYTES.get(plan.dtype, 4)


def _entries(plan: RunPlan, planned: PlannedSample) -> tuple[int, int]:
    """Entries per KV head in a sample's cache: at the sample's end, and at the fullest moment of its prompt."""
    budget = plan.checked.budget
    length = len(planned.prompt.ids)
    seen = length + planned.max_new_tokens
    if budget is None:
        return seen, length
    mode = plan.policy.prefill_mode(plan.settings.prefill)
    at_prompt = budget.at(planned.compressible, length)
    fullest = length if mode != "bounded" else min(length, at_prompt + plan.settings.chunk)
    return min(seen, budget.at(planned.compressible, seen)), fullest


def _time(
    cell: SweepCell, samples: int, prompt_tokens: int, answer_tokens: int, measured: Sequence[MeasuredCell]
) -> tuple[float, str]:
    """Seconds, and what they are derived from: the samples most like these that there are."""
    same_model = [other for other in measured if other.model == cell.plan.model]
    same_suite = [other for other in same_model if other.suite == cell.suite]
    if same_suite:
        answer_tokens = round(samples * _sum(same_suite, "output_tokens") / _sum(same_suite, "samples"))
    for alike, source in (
        ([other for other in same_model if other.folder == cell.plan.folder], "its own samples"),
        ([other for other in same_model if other.policy == cell.policy], "the policy's other samples"),
        (same_model, "the model's other samples"),
    ):
        prefill, decode = _sum(alike, "prefill_seconds"), _sum(alike, "decode_seconds")
        if prefill > 0 and decode > 0:
            prompt_rate = _sum(alike, "prompt_tokens") / prefill
            answer_rate = max(_sum(alike, "output_tokens"), 1) / decode
            return prompt_tokens / prompt_rate + answer_tokens / answer_rate, source
    assumed = f"{PROMPT_RATE:,.0f} prompt and {ANSWER_RATE:g} answer tokens a second, assumed"
    return prompt_tokens / PROMPT_RATE + answer_tokens / ANSWER_RATE, assumed


def _measured_cells(out: Path) -> Iterable[MeasuredCell]:
    """Every cell in a results folder that has a summary."""
    for file in sorted(out.glob(f"*/*/*/{run_folder.SUMMARY}")):
        try:
            content = read_object(file)
            mean = checked(content, Summary).mean
        except (UserError, ValueError):
            continue  # half-written, or another program's: nothing to estimate from
        if mean is not None:
            identity = content["identity"]
            yield MeasuredCell(
                folder=file.parent,
                model=identity["model"],
                policy=identity["policy"]["label"],
                suite=identity["suite"],
                samples=mean.samples,
                prompt_tokens=mean.samples * mean.prompt_tokens,
                output_tokens=mean.samples * mean.output_tokens,
                prefill_seconds=mean.samples * mean.prefill_seconds,
                decode_seconds=mean.samples * mean.decode_seconds,
            )


def _sum(cells: Iterable[MeasuredCell], name: str) -> float:
    return sum(float(getattr(cell, name)) for cell in cells)
