"""One forward pass through the cache, planned on the host before the first layer attends.

How many entries each row holds before and after is known without looking at a tensor, because a kept set has the
same size in every layer and head. So nothing here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evictbench.cache.rope import angles

if TYPE_CHECKING:
    from evictbench.cache.slots.cache import EvictionCache
    from evictbench.cache.slots.eviction import Scored
    from evictbench.cache.slots.placement import Placement
    from evictbench.policy.step import Step


@dataclass
class Occupancy:
    """Entries that the decode queries of one row saw, charged state included. largest: by any head; total: the sum
    over steps, of the mean over heads where those differ."""

    largest: int = 0
    total: float = 0
    steps: int = 0

    def add(self, entries: int, mean: float | None = None) -> None:
        """One decode query's count; mean: over heads, where it is not the same for all."""
        self.largest = max(self.largest, entries)
        self.total += entries if mean is None else mean
        self.steps += 1


@dataclass
class Pass:
    """What a forward pass does to each row. Lists have one item a row.

    counts: real new tokens; before, after: entries held before it and once its own are written; seen: tokens seen
    after it; entries: what its own queries and the next may see, `queries + 1` each; targets: entries kept after
    the cut, None where nothing is cut. dense: every query sees everything, whatever the budget. settles: one token a
    row, and the policy's priorities are static, so that all layers are scored at its end, from their `views`. scored:
    what layers are cut by at its end. carried: what the policy hands on from layer to layer.
    """

    queries: int
    real: Tensor | None
    counts: list[int]
    before: list[int]
    after: list[int]
    seen: list[int]
    entries: list[list[int]]
    targets: list[int | None]
    dense: bool
    ends_prompt: bool
    holes: bool
    settles: bool = False
    views: list[Step] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    deadlines: dict[Placement, Tensor] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)
    _made: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    @classmethod
    def plan(cls, cache: EvictionCache, queries: int, real: Tensor | None) -> Pass:
        """Decide what the next pass does, from the cache's bookkeeping. A single new token is always real."""
        rows = len(cache.seen)
        counts = [queries] * rows
        if real is not None and queries > 1:
            counts = [int(count) for count in real.sum(-1).tolist()]
        if all(count == queries for count in counts):
            real = None
        columns = cache.columns + queries
        seen = [before + count for before, count in zip(cache.seen, counts, strict=True)]
        ends_prompt = False
        if not cache.prompt_done:
            prompt_length = columns if cache.prompt_length is None else cache.prompt_length
            ends_prompt = columns >= prompt_length
            cache.prompts = [prompt_length - (columns - tokens) for tokens in seen]
        after = [held + count for held, count in zip(cache.held, counts, strict=True)]
        if cache.policy.share_of == "cache":
            entries = [[cache.entries(row, held)] * (queries + 1) for row, held in enumerate(after)]
        else:
            entries = [
                [cache.entries(row, first) for first in range(cache.seen[row] + count - queries + 1, seen[row] + 2)]
                if cache.budget is not None and cache.budget.tokens is None
                else [cache.entries(row, seen[row] + 1)] * (queries + 1)
                for row, count in enumerate(counts)
            ]
        may_cut = cache.prompt_done or ends_prompt or not cache.dense
        targets: list[int | None] = []
        for row, held in enumerate(after):
            target = None
            if may_cut and held + 1 > entries[row][-1]:
                target = cache.policy.keep(entries[row][-1], "decode" if cache.prompt_done else "prompt")
            targets.append(target if target is not None and target < held else None)
        return cls(
            queries=queries,
            real=real,
            counts=counts,
            before=list(cache.held),
            after=after,
            seen=seen,
            entries=entries,
            targets=targets,
            dense=cache.reads_dense,
            ends_prompt=ends_prompt,
            holes=any(cache.holes),
            settles=queries == 1 and cache.policy.static and cache.policy.shares == "head",
        )

    @cached_property
    def rows(self) -> int:
        """Sequences in this pass."""
        return len(self.counts)

    @cached_property
    def used(self) -> int:
        """Slots in use once the new entries are written."""
        return max(self.after)

    @cached_property
    def steady(self) -> bool:
        """No row's budget changes within the pass."""
        return all(entries[0] == entries[-1] for entries in self.entries)

    @cached_property
    def single(self) -> bool:
        """One new token a row: decode, where a freed slot is written in place."""
        return self.queries == 1

    @cached_property
    def level(self) -> bool:
        """Every row holds equally much and has no padding, so that slots 0..used-1 are filled everywhere."""
        return self.real is None and min(self.before) == max(self.before)

    @cached_property
    def cuts(self) -> bool:
        """Something is evicted after it."""
        return any(target is not None for target in self.targets)

    @cached_property
    def one_out(self) -> bool:
        """Each row that is cut loses exactly one entry, whose slot the next token takes."""
        return self.single and all(
            target is None or target == after - 1 for target, after in zip(self.targets, self.after, strict=True)
        )

    def groups(self) -> list[tuple[list[int] | None, int]]:
        """Rows that are cut to the same size, with that size; None stands for all rows."""
        by_target: dict[int, list[int]] = {}
        for row, target in enumerate(self.targets):
            if target is not None:
                by_target.setdefault(target, []).append(row)
        return [(None if len(rows) == self.rows else rows, target) for target, rows in by_target.items()]

    # Tensors that several layers need are made once per device.

    def once(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """A tensor made on first use and shared by the layers of a device."""
        if (name, device) not in self._made:
            self._made[name, device] = make()
        return self._made[name, device]

    def query_positions(self, device: torch.device) -> Tensor:
        """`[rows, queries]` int32, -1 for padding."""

        def make() -> Tensor:
            last = torch.tensor(self.seen, dtype=torch.int32, device=device)[:, None]
            back = torch.arange(self.queries - 1, -1, -1, dtype=torch.int32, device=device)
            positions = last - 1 - back
            return positions if self.real is None else positions.masked_fill(~self.real.to(device), -1)

        return self.once("query_positions", device, make)

    def turning_back(self, inv_freq: Tensor, dtype: torch.dtype, *behind: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[rows, 1, len(behind) · queries, rotary / 2]` that undo the rotation of the keys so many
        positions before each query, one set of queries after the other; of position 0 where that is before the first.
        """

        def make() -> Tensor:
            asking = self.query_positions(inv_freq.device)
            positions = torch.cat([(asking - back).clamp(min=0) for back in behind], dim=1)
            return torch.stack(angles(-positions[:, None], inv_freq, dtype))

        cos, sin = self.once(f"turning_back {behind}", inv_freq.device, make)
        return cos, sin

    def budgets(self, device: torch.device) -> Tensor:
        """`[rows, queries + 1]` int64: what each query may see, and the next one."""
        return self.once("budgets", device, lambda: torch.tensor(self.entries, device=device))

    def following(self, device: torch.device) -> Tensor:
        """`[rows, 1, 1]`: the position of the next query."""
        return self.once("following", device, lambda: torch.tensor(self.seen, device=device)[:, None, None])

    def free_slots(self, device: torch.device) -> Tensor:
        """`[rows, 1]`: the first slot behind what is held after the cut."""
        held = [after if target is None else target for after, target in zip(self.after, self.targets, strict=True)]
        return self.once("free_slots", device, lambda: torch.tensor(held, device=device)[:, None])

    def cut_rows(self, device: torch.device) -> Tensor:
        """`[rows, 1]` bool: which rows lose an entry."""
        cut = [target is not None for target in self.targets]
        return self.once("cut_rows", device, lambda: torch.tensor(cut, device=device)[:, None])

    def slots(self, device: torch.device) -> Tensor:
        """`[rows, queries]`: where new entries go; padding goes behind what the row holds."""

        def make() -> Tensor:
            before = torch.tensor(self.before, device=device)[:, None]
            if self.real is None:
                return before + torch.arange(self.queries, device=device)
            real = self.real.to(device)
            after = torch.tensor(self.after, device=device)[:, None]
            return torch.where(real, before + real.cumsum(-1) - 1, after + (~real).cumsum(-1) - 1)

        return self.once("slots", device, make)

    def front(self, buffer: Tensor) -> Tensor:
        """The rows and slots of a buffer that are in use; the buffer itself where that is all of it."""
        if buffer.shape[0] == self.rows and buffer.shape[2] == self.used:
            return buffer
        return buffer[: self.rows, :, : self.used]

    def put(self, buffer: Tensor, value: Tensor | float, free: Tensor) -> None:
        """Write a pass's new entries `[rows, kv_heads, queries, ...]`, or one number for all, into a buffer.

        free: the placement's `[rows, sets]` slots for a single new token.
        """
        rows = self.rows
        if self.level and not (self.single and self.holes):
            start = self.before[0]
            buffer[:rows, :, start : start + self.queries] = value
        elif self.single:
            index = free[: self.rows, :, None]
            if buffer.dim() == 4:
                index = index[..., None].expand(-1, buffer.shape[1], 1, buffer.shape[3])
            elif index.shape[1] != buffer.shape[1]:
                index = index.expand(-1, buffer.shape[1], 1)
            target = buffer if buffer.shape[0] == rows else buffer[:rows]
            if isinstance(value, Tensor):
                target.scatter_(2, index, value.expand(index.shape))
            else:
                target.scatter_(2, index, value=value)
        else:
            row = torch.arange(rows, device=buffer.device)[:, None]
            where = self.slots(buffer.device)
            buffer[row, :, where] = value.transpose(1, 2) if isinstance(value, Tensor) else value
