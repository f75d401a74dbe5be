"""Decode steps beside each other at one length and number of rows; what cannot fit is a line and is not tried.

Whatever one contender fails with stands in its line, and the others go on: a GPU is lent for minutes.
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
from evictbench.generation.runner import Feeder
from evictbench.models.machine import Memory
from evictbench.policy.budget import Budget
from evictbench.trace.cell import Measuring, _entries, _most_held, _most_read

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.slots.cache import EvictionCache
    from evictbench.policy import Policy

MARGIN = 3 * 2**30
"""Bytes that are left free beside caches: for a step's own tensors and what the allocator keeps."""

LOST = 1.08
"""What a cache takes for each byte of keys and values: positions, a policy's numbers, pages that are partly empty."""


@dataclass(frozen=True)
class Contender:
    """What is measured under one name. budget: None for a policy without one."""

    name: str
    policy: Policy
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
        self.memory = Memory([model.device])
        self.measuring = Measuring(model, self.memory)
        self.room = room or self._room

    def cell(self, seen: int, rows: int) -> Iterator[Line]:
        """Every contender, side by side in memory, step by step in turns: first as it is, then recorded."""
        arms: dict[str, _Arm] = {}
        lines: dict[str, Line] = {}
        self.memory.free()
        for one in self.contenders:
            lines[one.name] = Line(one.name, seen, rows)
            made = self._made(one, seen, rows)
            if isinstance(made, str):
                lines[one.name] = replace(lines[one.name], note=made)
            else:
                arms[one.name], lines[one.name] = made
        for name, found in self._turns({name: arm.step for name, arm in arms.items()}).items():
            lines[name] = replace(lines[name], **found)
        recorded: dict[str, RecordedStep] = {}
        for name, arm in arms.items():
            try:
                recorded[name] = self._recorded(arm)
            except Exception as error:  # whatever it fails with is the result
                lines[name] = replace(lines[name], note=_joined(lines[name].note, f"no graph: {_sentence(error)}"))
        steps = {name: _again(arms[name], step) for name, step in recorded.items()}
        for name, found in self._turns(steps, "recorded").items():
            lines[name] = replace(lines[name], **found)
        yield from lines.values()

    def _turns(self, steps: dict[str, Callable[[], Any]], field: str = "seconds") -> dict[str, dict[str, Any]]:
        """What each line is told: its seconds, or why nobody has any."""
        if not steps:
            return {}
        try:
            found = in_turns(steps, self.runs, self.steps)
        except Exception as error:
            return {name: {"note": _sentence(error)} for name in steps}
        return {name: {field: seconds} for name, seconds in found.items()}

    def prompts(self, seen: int, chunk: int) -> Iterator[Line]:
        """Every contender by itself: a prompt is read in chunks, then a few steps follow."""
        generator = torch.Generator().manual_seed(2)
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        prompt = torch.randint(vocabulary, (seen,), generator=generator).tolist()
        for one in self.contenders:
            self.memory.free()
            feeder = Feeder(self.model, one.policy, one.budget, chunk=chunk)
            if why := self._refused(_most_read(feeder, seen)):
                yield Line(one.name, seen, 1, note=why)
                continue
            try:
                yield self._read(one.name, feeder, prompt)
            except Exception as error:
                yield Line(one.name, seen, 1, note=_sentence(error))

    def _read(self, name: str, feeder: Feeder, prompt: list[int]) -> Line:
        before = self.memory.now()[0]
        self.memory.restart()
        self.wait()
        began = time.perf_counter()
        cache = feeder.prompt_cache(prompt, None)
        for start, stop in feeder.passes(len(prompt), None):
            feeder.feed(cache, [prompt[start:stop]], [start])
            self.wait()
            if self.seconds_left() < 0:
                return Line(name, len(prompt), 1, note=f"no time: {stop} of {len(prompt)} tokens read")
        took = time.perf_counter() - began
        self.memory.now()
        peak = self.memory.peak - before
        arm = _Arm(self.model, feeder, cache)
        for _ in range(WARM_STEPS):
            arm.step()
        seconds = statistics.median(arm.timed() for _ in range(self.steps))
        held = float(_entries(cache)[1])
        return Line(name, len(prompt), 1, held, seconds, None, cache.nbytes(), peak, took, note="prompt read")

    def _made(self, one: Contender, seen: int, rows: int) -> tuple[_Arm, Line] | str:
        """An arm with a filled cache, and its line without times; or why not."""
        if self.seconds_left() < 0:
            return "no time"
        feeder = Feeder(self.model, one.policy, one.budget)
        if why := self._refused(rows * _most_held(feeder, seen, seen)):
            return why
        before = self.memory.now()[0]
        try:
            arm = _Arm(self.model, feeder, filled(feeder, rows, seen))
            self.memory.restart()
            for _ in range(WARM_STEPS):
                arm.step()
        except Exception as error:
            return _sentence(error)
        self.memory.now()
        held, nbytes, own = float(_entries(arm.cache)[1]), arm.cache.nbytes(), self.memory.peak - before
        return arm, Line(one.name, seen, rows, held, cache_bytes=nbytes, own_bytes=own)

    def _refused(self, entries: int) -> str:
        """Why so many entries of a KV head cannot be held."""
        wanted, free = int(entries * self.measuring.token_bytes * LOST), self.room()
        if wanted + MARGIN <= free:
            return ""
        return f"does not fit: {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"

    def _recorded(self, arm: _Arm) -> RecordedStep:
        if self.record is None:
            raise UserError("CUDA graphs are on GPUs only")
        growing = arm.feeder.budget is None
        step = RecordedStep(arm.feeder, arm.cache, arm.tokens(), self.record, moves=not growing)
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


class _Arm:
    """A cache and the tokens that it is fed, drawn from a seed; a step ends when the likeliest next ones are known."""

    def __init__(self, model: PreTrainedModel, feeder: Feeder, cache: EvictionCache) -> None:
        self.model, self.feeder, self.cache = model, feeder, cache
        self._generator = torch.Generator().manual_seed(3)
        self._vocabulary: int = model.config.get_text_config(decoder=True).vocab_size

    def tokens(self) -> torch.Tensor:
        """The next token of each row, on the CPU."""
        return torch.randint(self._vocabulary, (len(self.cache.seen),), generator=self._generator)

    def step(self) -> None:
        """As in generation: the host gives tokens and waits for tokens."""
        logits = self.feeder.feed(self.cache, self.tokens()[:, None].tolist(), list(self.cache.seen))
        logits[:, -1].argmax(-1).tolist()

    def timed(self) -> float:
        """Seconds of a step."""
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began


def _again(arm: _Arm, recorded: RecordedStep) -> Callable[[], Any]:
    return lambda: recorded.step(arm.tokens()).argmax(-1).tolist()


def _sentence(error: BaseException) -> str:
    words = " ".join(str(error).split())[:140]
    return words if isinstance(error, UserError) else f"{type(error).__name__}: {words}"


def _joined(note: str, more: str) -> str:
    return f"{note}; {more}" if note else more


def top_kernels(step: Callable[[], Any], count: int = 12) -> list[tuple[str, float, int]]:
    """Where a step's device time goes, by torch's profiler: operations, milliseconds of each, calls."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds) as seen:
        step()
    name = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = sorted(seen.key_averages(), key=lambda event: -float(getattr(event, name)))
    return [(event.key[:60], float(getattr(event, name)) / 1000, event.count) for event in events[:count]]
