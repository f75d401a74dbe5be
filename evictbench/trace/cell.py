"""One cell of a trace: a prompt is read, its survivors are copied to every row, and the rows decode together.

Tokens are told and not chosen, so that every policy does the same work; finding the likeliest one is part of each pass.
A prompt is read once, alone, and every row starts from what it left. The clock waits for the device once a phase; the
passes wait where they do in generation, when tokens are handed over and where a policy needs a number on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evictbench.cache.clock import Clock, clock_for
from evictbench.cache.paged.cache import PagedCache
from evictbench.errors import UserError
from evictbench.generation.batching import admit
from evictbench.models.machine import Memory, ran_out
from evictbench.policy.step import ModelShape
from evictbench.store.trace_files import DECODE, OK, OUT_OF_MEMORY, PREFILL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.slots.cache import EvictionCache
    from evictbench.generation.runner import Feeder
    from evictbench.trace.settings import Cell


WARM_STEPS = 3


@dataclass(frozen=True)
class Text:
    """What is fed. prompt: token ids, of which a cell reads as many as its context has; following: for each row the
    tokens that are fed after it."""

    prompt: Sequence[int]
    following: Callable[[int, int], Sequence[Sequence[int]]]


@dataclass
class Measured:
    """A cell's steps and looks, as rows of the trace's files, and what else is said of it. looks: which positions
    were held."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Phase:
    """The passes of one phase that are done. seconds: its wall clock, without pauses."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    failed: BaseException | None = None


class Measuring:
    """Measures one cell after the other on one model.

    token_bytes: of one token's keys and values in all layers. weight_bytes: what a decode step reads of the weights.
    """

    def __init__(self, model: PreTrainedModel, memory: Memory) -> None:
        self.model = model
        self.memory = memory
        shape = ModelShape.of(model.config)
        self.token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize
        self.weight_bytes = read_weights(model)

    def measure(self, feeder: Feeder, cell: Cell, text: Text, every: int | None) -> Measured:
        """Run a cell. Memory that runs out is a result: what was measured before is kept, in decode.

        every: look at what is held each time that so many more tokens have been seen; None: never.
        """
        found = Measured()
        self.memory.free()
        prompt = list(text.prompt[: cell.context])
        clock = clock_for(self.model.device)
        looks = Looks(every, found.looks)
        with torch.inference_mode():
            caches: dict[str, EvictionCache] = {}
            done = self._read(feeder, prompt, clock, looks, caches)
            self._note(found, PREFILL, done, cell, 0)
            if done.failed is None:
                found.about["first_token_seconds"] = done.seconds
                fed = text.following(cell.context, cell.rows)
                done = self._decode(feeder, cell, fed, clock, looks, caches, found.about)
                self._note(found, DECODE, done, cell, cell.context)
            caches.clear()
        found.about["status"] = OK if done.failed is None else OUT_OF_MEMORY
        if done.failed is not None:
            done.failed.__traceback__ = None  # its frames hold the tensors
        self._rates(found, cell)
        return found

    def evicts_prompt(self, feeder: Feeder, cell: Cell) -> bool:
        """Whether the prompt is longer than what is kept of it."""
        return cell.context > _most_held(feeder, cell.context, cell.context)

    def warm(self, feeder: Feeder, cell: Cell, text: Text) -> None:
        """Do a little of a cell unmeasured: the first passes of a kind compile, load and allocate."""
        enough = max(2 * feeder.chunk, _most_held(feeder, cell.context, cell.context) + feeder.chunk)
        prompt = list(text.prompt[: min(cell.context, enough)])
        fed = text.following(cell.context, cell.rows)
        clock = clock_for(self.model.device)
        with suppress(UserError, MemoryError, torch.OutOfMemoryError), torch.inference_mode():  # the short text's own
            caches: dict[str, EvictionCache] = {}
            if self._read(feeder, prompt, clock, Looks(None, []), caches).failed is None:
                self._decode(feeder, cell, fed[:WARM_STEPS], clock, Looks(None, []), caches, {})

    def _read(
        self, feeder: Feeder, prompt: list[int], clock: Clock, looks: Looks, caches: dict[str, EvictionCache]
    ) -> _Phase:
        def passes() -> Iterator[tuple[list[list[int]], list[int]]]:
            for start, stop in feeder.passes(len(prompt), None):
                yield [prompt[start:stop]], [start]

        def begin() -> EvictionCache:
            self._check_room(_most_read(feeder, len(prompt)))
            caches[PREFILL] = feeder.new_cache(prompt_length=len(prompt))
            return caches[PREFILL]

        return self._phase(feeder, begin, passes(), clock, looks)

    def _decode(
        self,
        feeder: Feeder,
        cell: Cell,
        fed: Sequence[Sequence[int]],
        clock: Clock,
        looks: Looks,
        caches: dict[str, EvictionCache],
        about: dict[str, Any],
    ) -> _Phase:
        """fed: for each step the token of each row."""
        began = time.perf_counter()

        def begin() -> EvictionCache:
            seen = caches[PREFILL].seen[0]
            self._check_room(cell.rows * _most_held(feeder, seen, seen + len(fed)))
            cache = caches[DECODE] = feeder.new_cache(rows=cell.rows)
            for _ in range(cell.rows):
                admit(cache, caches[PREFILL])
            del caches[PREFILL]
            clock.wait()
            about["admit_seconds"] = time.perf_counter() - began
            return cache

        def passes() -> Iterator[tuple[list[list[int]], list[int]]]:
            for tokens in fed:
                yield [[token] for token in tokens], list(caches[DECODE].seen)

        return self._phase(feeder, begin, passes(), clock, looks)

    def _phase(
        self,
        feeder: Feeder,
        begin: Callable[[], EvictionCache],
        passes: Iterable[tuple[list[list[int]], list[int]]],
        clock: Clock,
        looks: Looks,
    ) -> _Phase:
        """Time passes one by one; the device is waited for at the end, and at each look."""
        done, held = _Phase(), []
        self.memory.restart()
        try:
            cache = begin()
            cache.clock = clock
            clock.wait()
            began, paused = time.perf_counter(), 0.0
            for tokens, starts in passes:
                clock.start()
                try:
                    feeder.feed(cache, tokens, starts)[:, -1].argmax(-1)
                except BaseException:
                    clock.drop()
                    raise
                clock.stop()
                held.append((cache.seen[0], _entries(cache), cache.nbytes(), self.memory.now()))
                if looks.due(cache.seen[0]):
                    clock.wait()
                    looking = time.perf_counter()
                    looks.look(cache)
                    paused += time.perf_counter() - looking
            clock.wait()
            done.seconds = time.perf_counter() - began - paused
            looks.end(cache)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            done.failed = error
        for step, (times, (seen, entries, cache_bytes, memory)) in enumerate(zip(clock.read(), held, strict=True)):
            done.steps.append(
                {
                    "step": step,
                    "position": seen,
                    "ms": times.total,
                    "attention_ms": times.attention,
                    "signals_ms": times.signals,
                    "policy_ms": times.policy,
                    "rest_ms": times.rest,
                    "entries_max": int(entries[0]),
                    "entries_mean": float(entries[1]),
                    "cache_bytes": cache_bytes,
                    "allocated_bytes": memory[0],
                    "reserved_bytes": memory[1],
                    "status": OK,
                }
            )
        return done

    def _check_room(self, entries: int) -> None:
        """Raise MemoryError where so many entries of a KV head are more than the process may have."""
        room = self.memory.available()
        if room is not None and entries * self.token_bytes > room:
            raise MemoryError("the cache is larger than the memory that is left")

    def _note(self, found: Measured, phase: str, done: _Phase, cell: Cell, position: int) -> None:
        """Take a phase's rows. Of a prompt that could not be read whole none are kept: its time would look short."""
        rows = done.steps if done.failed is None or phase == DECODE else []
        if done.failed is not None:
            last = done.steps[-1] if done.steps else {"position": position}
            rows = [*rows, {"step": len(done.steps), "position": last["position"], "status": OUT_OF_MEMORY}]
        else:
            found.about |= {f"{phase}_seconds": done.seconds, f"{phase}_steps": len(done.steps)}
            found.about[f"{phase}_peak_bytes"] = self.memory.peak
            found.about[f"{phase}_cache_bytes"] = max(row["cache_bytes"] for row in done.steps)
        same = {**cell._asdict(), "phase": phase}
        found.steps += [same | row for row in rows]

    def _rates(self, found: Measured, cell: Cell) -> None:
        """Bytes read a second in decode: weights once, and the keys and values of all entries, a pass."""
        rates, times = [], []
        for row in found.steps:
            if row["phase"] == DECODE and row["status"] == OK and row["ms"] > 0:
                read = self.weight_bytes + cell.rows * row["entries_mean"] * self.token_bytes
                rates.append(read / (row["ms"] / 1000))
                times.append(row["ms"])
        if rates:
            found.about |= {"decode_ms": median(times), "read_bytes_per_second": median(rates)}


def _entries(cache: EvictionCache) -> tuple[Tensor | float, Tensor | float]:
    """Entries that a KV head holds, the most and the mean; on the device where only that knows, to be read later."""
    if not isinstance(cache, PagedCache):
        return max(cache.held), sum(cache.held) / len(cache.held)
    if plain := [prompt.length for layer in cache.layers for prompt in layer.prompts.values()]:
        return max(plain), sum(plain) / len(plain)
    owners = len(cache.seen) * cache.shape.kv_heads
    pools = [layer.pool for layer in cache.layers if layer.pool is not None]
    visible = torch.stack([pool.visible[:owners].to(pools[0].device) for pool in pools])
    return visible.amax(), visible.double().mean()


def _most_held(feeder: Feeder, prompt: int, seen: int) -> int:
    """Entries of a row's KV head in decode."""
    return seen if feeder.budget is None else min(seen, feeder.budget.at(prompt, seen))


def _most_read(feeder: Feeder, prompt: int) -> int:
    """Entries of a KV head at the fullest moment of a prompt."""
    mode = feeder.policy.prefill if feeder.prefill == "native" else feeder.prefill
    if feeder.budget is None or mode != "bounded":
        return prompt
    return min(prompt, feeder.budget.at(prompt, prompt) + feeder.chunk)


def read_weights(model: PreTrainedModel) -> int:
    """Bytes of weights that a decode step reads: all, but of an embedding that is not the head's too only some rows."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if tied or embedding is None else total - int(embedding.weight.nbytes)


class Looks:
    """Looks whenever `every` more tokens have been seen and at the end of each phase, into `rows` of retention.parquet;
    never where `every` is None."""

    def __init__(self, every: int | None, rows: list[dict[str, Any]]) -> None:
        self.every = every
        self.rows = rows
        self._next = every or 0

    def due(self, seen: int) -> bool:
        """Whether it is time to look."""
        if self.every is None or seen < self._next:
            return False
        self._next = (seen // self.every + 1) * self.every
        return True

    def end(self, cache: EvictionCache) -> None:
        """The end of a phase."""
        if self.every is not None and (not self.rows or self.rows[-1]["seen"] != cache.seen[0]):
            self.look(cache)

    def look(self, cache: EvictionCache) -> None:
        """Note what the first row's heads hold."""
        for layer in range(cache.shape.layers):
            held = cache.kept(layer).cpu()
            for head in range(cache.shape.kv_heads):
                positions = held[head if held.shape[0] > 1 else 0]
                self.rows.append(
                    {
                        "seen": cache.seen[0],
                        "layer": layer,
                        "head": head,
                        "positions": positions[positions >= 0].tolist(),
                    }
                )
