"""One cell of a trace: a prompt is read, its survivors are copied to every row, and the rows decode together.

The tokens that are decoded are given, so that every policy does the same work; finding the likeliest token is part of
each pass all the same. A prompt is read once, alone, and every row starts from what is kept of it. The clock waits for
the device once a phase; a pass waits where generation does: when tokens are handed over, and where a policy needs a
number on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from evictbench.cache.clock import Clock, clock_for
from evictbench.errors import UserError, is_out_of_memory
from evictbench.models.machine import MemoryUsage
from evictbench.policy.step import ModelShape
from evictbench.store.trace_files import DECODE, OK, OUT_OF_MEMORY, PREFILL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.base import KVCache
    from evictbench.generation.runner import ModelRunner
    from evictbench.trace.settings import TraceCell


WARM_UP_STEPS = 3


@dataclass(frozen=True)
class TraceText:
    """The tokens that are fed.

    prompt: token ids, of which a cell reads as many as its context has. decoded(context, rows): the tokens that are fed
    after that much of the prompt, for each step one of each row.
    """

    prompt: Sequence[int]
    decoded: Callable[[int, int], Sequence[Sequence[int]]]


@dataclass
class CellResult:
    """What was measured in a cell: rows of the trace's two tables, and the rest of the cell's line in trace.json."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Phase:
    """The finished passes of one phase. seconds: its wall clock without pauses. error: what ended it early."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    error: BaseException | None = None


class CellRunner:
    """Measures one cell after the other on one model.

    token_bytes: of one token's keys and values in all layers. weight_bytes: of the weights that a decode step reads.
    """

    def __init__(self, model: PreTrainedModel, memory: MemoryUsage) -> None:
        self.model = model
        self.memory = memory
        shape = ModelShape.of(model.config)
        self.token_bytes = shape.layers * shape.kv_heads * shape.entry_numbers * model.dtype.itemsize
        self.weight_bytes = read_weight_bytes(model)

    def run(self, runner: ModelRunner, cell: TraceCell, text: TraceText, snapshot_every: int | None) -> CellResult:
        """Measure a cell. Memory that runs out is a result: the decode steps before it are kept.

        snapshot_every: tokens seen between two snapshots of what is kept; None: no snapshots.
        """
        result = CellResult()
        self.memory.release_unused()
        prompt = list(text.prompt[: cell.context])
        clock = clock_for(self.model.device)
        snapshots = RetentionSnapshots(snapshot_every, result.snapshots)
        with torch.inference_mode():
            caches: dict[str, KVCache] = {}
            phase = self._read(runner, prompt, clock, snapshots, caches)
            self._add_phase(result, PREFILL, phase, cell, 0)
            if phase.error is None:
                result.summary["first_token_seconds"] = phase.seconds
                decoded = text.decoded(cell.context, cell.rows)
                phase = self._decode(runner, cell, decoded, clock, snapshots, caches, result.summary)
                self._add_phase(result, DECODE, phase, cell, cell.context)
            caches.clear()
        result.summary["status"] = OK if phase.error is None else OUT_OF_MEMORY
        if phase.error is not None:
            phase.error.__traceback__ = None  # its frames hold the tensors
        self._add_rates(result, cell)
        return result

    def evicts_prompt(self, runner: ModelRunner, cell: TraceCell) -> bool:
        """Whether the prompt is longer than what is kept of it."""
        return cell.context > most_entries_decoding(runner, cell.context, cell.context)

    def warm_up(self, runner: ModelRunner, cell: TraceCell, text: TraceText) -> None:
        """Do a little of a cell unmeasured: the first passes of a kind compile, load and allocate."""
        enough = max(2 * runner.chunk, most_entries_decoding(runner, cell.context, cell.context) + runner.chunk)
        prompt = list(text.prompt[: min(cell.context, enough)])
        decoded = text.decoded(cell.context, cell.rows)
        clock, snapshots = clock_for(self.model.device), RetentionSnapshots(None, [])
        with suppress(UserError, MemoryError, torch.OutOfMemoryError), torch.inference_mode():  # the short text's own
            caches: dict[str, KVCache] = {}
            if self._read(runner, prompt, clock, snapshots, caches).error is None:
                self._decode(runner, cell, decoded[:WARM_UP_STEPS], clock, snapshots, caches, {})

    def _read(
        self,
        runner: ModelRunner,
        prompt: list[int],
        clock: Clock,
        snapshots: RetentionSnapshots,
        caches: dict[str, KVCache],
    ) -> _Phase:
        def passes() -> Iterator[tuple[list[list[int]], list[int]]]:
            for start, stop in runner.chunks(len(prompt), None):
                yield [prompt[start:stop]], [start]

        def begin() -> KVCache:
            self._check_room(most_entries_reading(runner, len(prompt)))
            caches[PREFILL] = runner.new_cache(prompt_length=len(prompt))
            return caches[PREFILL]

        return self._run_phase(runner, begin, passes(), clock, snapshots)

    def _decode(
        self,
        runner: ModelRunner,
        cell: TraceCell,
        decoded: Sequence[Sequence[int]],
        clock: Clock,
        snapshots: RetentionSnapshots,
        caches: dict[str, KVCache],
        summary: dict[str, Any],
    ) -> _Phase:
        """Decode all rows. decoded: for each step the token of each row. summary: gets the seconds of the copying."""
        began = time.perf_counter()

        def begin() -> KVCache:
            seen = caches[PREFILL].seen[0]
            self._check_room(cell.rows * most_entries_decoding(runner, seen, seen + len(decoded)))
            cache = caches[DECODE] = runner.new_cache(rows=cell.rows)
            for _ in range(cell.rows):
                cache.admit(caches[PREFILL])
            del caches[PREFILL]
            clock.wait()
            summary["admit_seconds"] = time.perf_counter() - began
            return cache

        def passes() -> Iterator[tuple[list[list[int]], list[int]]]:
            for tokens in decoded:
                yield [[token] for token in tokens], list(caches[DECODE].seen)

        return self._run_phase(runner, begin, passes(), clock, snapshots)

    def _run_phase(
        self,
        runner: ModelRunner,
        begin: Callable[[], KVCache],
        passes: Iterable[tuple[list[list[int]], list[int]]],
        clock: Clock,
        snapshots: RetentionSnapshots,
    ) -> _Phase:
        """Time passes one by one; the device is waited for at the end, and at each snapshot."""
        phase, readings = _Phase(), []
        self.memory.reset_peak()
        try:
            cache = begin()
            cache.clock = clock
            clock.wait()
            began, paused = time.perf_counter(), 0.0
            for tokens, starts in passes:
                clock.start()
                try:
                    runner.forward(cache, tokens, starts)[:, -1].argmax(-1)
                except BaseException:
                    clock.drop()
                    raise
                clock.stop()
                readings.append((cache.seen[0], cache.entries_held(), cache.nbytes(), self.memory.current()))
                if snapshots.due(cache.seen[0]):
                    clock.wait()
                    pause = time.perf_counter()
                    snapshots.take(cache)
                    paused += time.perf_counter() - pause
            clock.wait()
            phase.seconds = time.perf_counter() - began - paused
            snapshots.take_last(cache)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            phase.error = error
        for step, (times, reading) in enumerate(zip(clock.read(), readings, strict=True)):
            seen, (most, mean), cache_bytes, (allocated, reserved) = reading
            phase.steps.append(
                {
                    "step": step,
                    "position": seen,
                    "ms": times.total,
                    "attention_ms": times.attention,
                    "signals_ms": times.signals,
                    "policy_ms": times.policy,
                    "rest_ms": times.rest,
                    "entries_max": int(most),
                    "entries_mean": float(mean),
                    "cache_bytes": cache_bytes,
                    "allocated_bytes": allocated,
                    "reserved_bytes": reserved,
                    "status": OK,
                }
            )
        return phase

    def _check_room(self, entries: int) -> None:
        """Raise MemoryError where `entries` in every KV head take more memory than the process may have."""
        room = self.memory.available()
        if room is not None and entries * self.token_bytes > room:
            raise MemoryError("the cache is larger than the memory that is left")

    def _add_phase(self, result: CellResult, name: str, phase: _Phase, cell: TraceCell, position: int) -> None:
        """Add the rows of a phase. A prompt that was not read whole adds none: its time would look short.

        position: tokens seen before the phase.
        """
        rows = phase.steps if phase.error is None or name == DECODE else []
        if phase.error is not None:
            last = phase.steps[-1] if phase.steps else {"position": position}
            rows = [*rows, {"step": len(phase.steps), "position": last["position"], "status": OUT_OF_MEMORY}]
        else:
            result.summary |= {f"{name}_seconds": phase.seconds, f"{name}_steps": len(phase.steps)}
            result.summary[f"{name}_peak_bytes"] = self.memory.peak
            result.summary[f"{name}_cache_bytes"] = max(row["cache_bytes"] for row in phase.steps)
        common = {**cell._asdict(), "phase": name}
        result.steps += [common | row for row in rows]

    def _add_rates(self, result: CellResult, cell: TraceCell) -> None:
        """Add the bytes read a second in decode: a pass reads the weights once, and keys and values of all entries."""
        rates, times = [], []
        for row in result.steps:
            if row["phase"] == DECODE and row["status"] == OK and row["ms"] > 0:
                nbytes = self.weight_bytes + cell.rows * row["entries_mean"] * self.token_bytes
                rates.append(nbytes / (row["ms"] / 1000))
                times.append(row["ms"])
        if rates:
            result.summary |= {"decode_ms": median(times), "read_bytes_per_second": median(rates)}


class RetentionSnapshots:
    """Which positions the cache keeps: taken whenever `every` more tokens have been seen and at the end of each phase,
    into `rows` of retention.parquet; never where `every` is None."""

    def __init__(self, every: int | None, rows: list[dict[str, Any]]) -> None:
        self.every = every
        self.rows = rows
        self._next = every or 0

    def due(self, seen: int) -> bool:
        """Whether a snapshot is due after `seen` tokens."""
        if self.every is None or seen < self._next:
            return False
        self._next = (seen // self.every + 1) * self.every
        return True

    def take_last(self, cache: KVCache) -> None:
        """Take the snapshot at the end of a phase, unless there is one of this moment."""
        if self.every is not None and (not self.rows or self.rows[-1]["seen"] != cache.seen[0]):
            self.take(cache)

    def take(self, cache: KVCache) -> None:
        """Note the positions that the first row's heads keep."""
        for layer in range(cache.shape.layers):
            kept = cache.kept(layer).cpu()
            for head in range(cache.shape.kv_heads):
                positions = kept[head if kept.shape[0] > 1 else 0]
                self.rows.append(
                    {
                        "seen": cache.seen[0],
                        "layer": layer,
                        "head": head,
                        "positions": positions[positions >= 0].tolist(),
                    }
                )


def most_entries_decoding(runner: ModelRunner, prompt: int, seen: int) -> int:
    """The most entries that a row's KV head holds in decode, after `seen` tokens, `prompt` of them its prompt's."""
    return seen if runner.budget is None else min(seen, runner.budget.at(prompt, seen))


def most_entries_reading(runner: ModelRunner, prompt: int) -> int:
    """The most entries that a KV head holds while a prompt of `prompt` tokens is read."""
    mode = runner.policy.prefill_mode(runner.prefill_mode)
    if runner.budget is None or mode != "bounded":
        return prompt
    return min(prompt, runner.budget.at(prompt, prompt) + runner.chunk)


def read_weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a decode step reads. Of an embedding that is not the head too it reads only some rows,
    so that one is not counted."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if tied or embedding is None else total - int(embedding.weight.nbytes)
