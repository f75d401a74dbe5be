"""Decode steps beside each other at one length and number of rows; a cache that cannot fit is a line and is not made.

The error of one contender stands in its line, and the others go on: a GPU is lent for minutes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.limit import in_turns
from benchmarks.random_entries import filled
from benchmarks.recorded_step import WARM_STEPS, Record, RecordedStep
from evictbench.errors import UserError
from evictbench.generation.runner import ModelRunner
from evictbench.models.machine import MemoryUsage
from evictbench.policy.budget import Budget
from evictbench.trace.cell import CellRunner, most_entries_decoding, most_entries_reading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.base import KVCache
    from evictbench.policy import BasePolicy

MARGIN = 3 * 2**30
"""Bytes that are left free beside caches: for a step's own tensors and what the allocator keeps."""

OVERHEAD = 1.08
"""Bytes of a cache for each byte of its keys and values: positions, a policy's numbers, pages that are partly empty."""


@dataclass(frozen=True)
class Contender:
    """A policy that is measured. name: in the table. budget: None for a policy without one."""

    name: str
    policy: BasePolicy
    budget: Budget | None


@dataclass(frozen=True)
class Line:
    """One contender at one length and number of rows; None for what was not measured.

    held: entries of a KV head, mean. seconds: of a step; recorded: of the same step, repeated without Python.
    cache_bytes: of the decode cache; own_bytes: the most that the cache and the steps took, without the weights.
    read_seconds: a prompt's prefill, where one was read.
    """

    name: str
    seen: int
    rows: int
    held: float | None = None
    seconds: float | None = None
    recorded: float | None = None
    cache_bytes: int | None = None
    own_bytes: int | None = None
    read_seconds: float | None = None
    note: str = ""


class Bench:
    """Measures cells on one model. seconds_left: until nothing new is begun; room: bytes that are free now."""

    def __init__(
        self,
        model: PreTrainedModel,
        contenders: Sequence[Contender],
        seconds_left: Callable[[], float],
        record: Record | None,
        runs: int = 5,
        steps: int = 4,
        room: Callable[[], int] | None = None,
    ) -> None:
        self.model, self.contenders, self.seconds_left = model, contenders, seconds_left
        self.record, self.runs, self.steps = record, runs, steps
        self.memory = MemoryUsage([model.device])
        self.cells = CellRunner(model, self.memory)
        self.room = room or self._room

    def cell(self, seen: int, rows: int) -> Iterator[Line]:
        """Every contender, side by side in memory, step by step in turns: first as it is, then recorded."""
        arms: dict[str, DecodeArm] = {}
        lines: dict[str, Line] = {}
        for contender in self.contenders:
            arm, lines[contender.name] = self._start(contender, seen, rows)
            if arm is not None:
                arms[contender.name] = arm
        for name, times in self._turns({name: arm.step for name, arm in arms.items()}).items():
            lines[name] = replace(lines[name], **times)
        recorded: dict[str, RecordedStep] = {}
        for name, arm in arms.items():
            try:
                recorded[name] = self._recorded(arm)
            except Exception as error:  # whatever it fails with is the result
                lines[name] = replace(lines[name], note=_joined(lines[name].note, f"no graph: {_sentence(error)}"))
        steps = {name: _next_step(arms[name], step) for name, step in recorded.items()}
        for name, times in self._turns(steps, "recorded").items():
            lines[name] = replace(lines[name], **times)
        yield from lines.values()

    def _turns(self, steps: dict[str, Callable[[], Any]], field: str = "seconds") -> dict[str, dict[str, Any]]:
        """Fields of each line: its seconds, or a note why nobody has any."""
        if not steps:
            return {}
        try:
            medians = in_turns(steps, self.runs, self.steps)
        except Exception as error:
            return {name: {"note": _sentence(error)} for name in steps}
        return {name: {field: seconds} for name, seconds in medians.items()}

    def prompts(self, seen: int, chunk: int) -> Iterator[Line]:
        """Every contender by itself: a prompt is read in chunks, and a few steps follow."""
        generator = torch.Generator().manual_seed(2)
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        prompt = torch.randint(vocabulary, (seen,), generator=generator).tolist()
        for contender in self.contenders:
            self.memory.release_unused()
            runner = ModelRunner(self.model, contender.policy, contender.budget, chunk=chunk)
            if why := self._refusal(most_entries_reading(runner, seen)):
                yield Line(contender.name, seen, 1, note=why)
                continue
            try:
                yield self._read(contender.name, runner, prompt)
            except Exception as error:
                yield Line(contender.name, seen, 1, note=_sentence(error))

    def _read(self, name: str, runner: ModelRunner, prompt: list[int]) -> Line:
        before = self.memory.current()[0]
        self.memory.reset_peak()
        self.wait()
        began = time.perf_counter()
        cache = runner.prompt_cache(prompt, None)
        for start, stop in runner.chunks(len(prompt), None):
            runner.forward(cache, [prompt[start:stop]], [start])
            self.wait()
            if self.seconds_left() < 0:
                return Line(name, len(prompt), 1, note=f"no time: {stop} of {len(prompt)} tokens read")
        read_seconds = time.perf_counter() - began
        self.memory.current()
        peak = self.memory.peak - before
        arm = DecodeArm(self.model, runner, cache)
        for _ in range(WARM_STEPS):
            arm.step()
        seconds = statistics.median(arm.timed() for _ in range(self.steps))
        held = float(cache.entries_held()[1])
        return Line(name, len(prompt), 1, held, seconds, None, cache.nbytes(), peak, read_seconds, "prompt read")

    def _start(self, contender: Contender, seen: int, rows: int) -> tuple[DecodeArm | None, Line]:
        """An arm with a filled cache, and its line without times; or a line that says why there is none."""
        line = Line(contender.name, seen, rows)
        if self.seconds_left() < 0:
            return None, replace(line, note="no time")
        self.memory.release_unused()
        runner = ModelRunner(self.model, contender.policy, contender.budget)
        if why := self._refusal(rows * most_entries_decoding(runner, seen, seen)):
            return None, replace(line, note=why)
        before = self.memory.current()[0]
        try:
            arm = DecodeArm(self.model, runner, filled(runner, rows, seen))
            self.memory.reset_peak()
            for _ in range(WARM_STEPS):
                arm.step()
        except Exception as error:
            return None, replace(line, note=_sentence(error))
        self.memory.current()
        held, nbytes = float(arm.cache.entries_held()[1]), arm.cache.nbytes()
        return arm, replace(line, held=held, cache_bytes=nbytes, own_bytes=self.memory.peak - before)

    def _refusal(self, entries: int) -> str:
        """Why so many entries of a KV head cannot be held; empty if they can."""
        wanted, free = int(entries * self.cells.token_bytes * OVERHEAD), self.room()
        if wanted + MARGIN <= free:
            return ""
        return f"does not fit: {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"

    def _recorded(self, arm: DecodeArm) -> RecordedStep:
        if self.record is None:
            raise UserError("CUDA graphs are on GPUs only")
        growing = arm.runner.budget is None
        step = RecordedStep(arm.runner, arm.cache, arm.tokens(), self.record, moves=not growing)
        for _ in range(WARM_STEPS):
            step.step(arm.tokens())
        return step

    def _room(self) -> int:
        if self.memory.gpus:
            return int(torch.cuda.mem_get_info(self.model.device)[0])
        return self.memory.available() or 0

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.memory.gpus:
            torch.cuda.synchronize(self.model.device)


class DecodeArm:
    """A cache and the tokens that it is fed, drawn from a seed; a step ends when the likeliest next ones are known."""

    def __init__(self, model: PreTrainedModel, runner: ModelRunner, cache: KVCache) -> None:
        self.model, self.runner, self.cache = model, runner, cache
        self._generator = torch.Generator().manual_seed(3)
        self._vocabulary: int = model.config.get_text_config(decoder=True).vocab_size

    def tokens(self) -> torch.Tensor:
        """The next token of each row, on the CPU."""
        return torch.randint(self._vocabulary, (len(self.cache.seen),), generator=self._generator)

    def step(self) -> None:
        """As in generation: the host gives tokens and waits for tokens."""
        logits = self.runner.forward(self.cache, self.tokens()[:, None].tolist(), list(self.cache.seen))
        logits[:, -1].argmax(-1).tolist()

    def timed(self) -> float:
        """Seconds of a step."""
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began


def _next_step(arm: DecodeArm, recorded: RecordedStep) -> Callable[[], Any]:
    return lambda: recorded.step(arm.tokens()).argmax(-1).tolist()


def _sentence(error: BaseException) -> str:
    sentence = " ".join(str(error).split())[:140]
    return sentence if isinstance(error, UserError) else f"{type(error).__name__}: {sentence}"


def _joined(note: str, more: str) -> str:
    return f"{note}; {more}" if note else more


def top_kernels(step: Callable[[], Any], count: int = 12) -> list[tuple[str, float, int]]:
    """Where a step's device time goes, by torch's profiler: operations, milliseconds of each, calls."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds) as profiled:
        step()
    name = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = sorted(profiled.key_averages(), key=lambda event: -float(getattr(event, name)))
    return [(event.key[:60], float(getattr(event, name)) / 1000, event.count) for event in events[:count]]
