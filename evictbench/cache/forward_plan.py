"""One forward pass through a cache, planned on the host before the first layer attends.

How many entries each row holds before and after is known without looking at a tensor, because every kept set of a row
has the same size. So nothing here waits for a GPU.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from evictbench.cache.rope import angles
from evictbench.cache.rows import Sequence

Allowance = Callable[[Sequence, int], int]
"""How many entries a query may see that is the n-th token of its row, itself included: (row, n) to a number."""


def real_tokens(queries: int, rows: int, real: Tensor | None) -> tuple[list[int], Tensor | None]:
    """How many new tokens of each row are not padding, and the mask `real` `[rows, queries]`; None where none is.

    A single new token is always real.
    """
    counts = [queries] * rows
    if real is not None and queries > 1:
        counts = [int(count) for count in real.sum(-1).tolist()]
    return counts, None if all(count == queries for count in counts) else real


@dataclass
class ForwardPlan:
    """What a forward pass does to each row. Lists have one item a row.

    queries: new tokens of a row, padding included. real: `[rows, queries]` bool, which of them are not padding; None:
    all. counts: how many are not. before, after: entries held before the pass, and once its own are written. seen:
    tokens seen after it. entries: how many entries each query may see and then the next query, `queries + 1` numbers a
    row. targets: entries to keep at the end of the pass, None where nothing is evicted. dense: every query sees
    everything, whatever the budget. ends_prompt: the prompt ends with this pass. decodes: it had ended before.
    freed_slots: in some row a slot is free that the new token takes.
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
    decodes: bool
    freed_slots: bool
    _made: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        rows: abc.Sequence[Sequence],
        queries: int,
        counts: list[int],
        real: Tensor | None,
        *,
        allowance: Allowance,
        keep: Callable[[int], int | None],
        changes: bool,
        of_cache: bool,
        dense: bool,
        decodes: bool,
        ends_prompt: bool,
    ) -> ForwardPlan:
        """Plan a pass. queries, counts, real: as of the class.

        allowance: how many entries a query may see. changes: it depends on how many tokens have been seen. of_cache: it
        is asked with the entries in the cache in place of the tokens seen. keep: how many entries to keep when one more
        would exceed an allowance, None: evict nothing. dense: the prompt is held whole until its end.
        """
        seen = [row.seen + count for row, count in zip(rows, counts, strict=True)]
        after = [row.held + count for row, count in zip(rows, counts, strict=True)]
        entries: list[list[int]] = []
        for row, count, tokens, held in zip(rows, counts, seen, after, strict=True):
            if of_cache:
                entries.append([allowance(row, held)] * (queries + 1))
            elif changes:
                first = row.seen + count - queries + 1
                entries.append([allowance(row, token) for token in range(first, tokens + 2)])
            else:
                entries.append([allowance(row, tokens + 1)] * (queries + 1))
        targets: list[int | None] = []
        for held, allowed in zip(after, entries, strict=True):
            target = None
            if (decodes or ends_prompt or not dense) and held + 1 > allowed[-1]:
                target = keep(allowed[-1])
            targets.append(target if target is not None and target < held else None)
        return cls(
            queries=queries,
            real=real,
            counts=counts,
            before=[row.held for row in rows],
            after=after,
            seen=seen,
            entries=entries,
            targets=targets,
            dense=dense and not decodes,
            ends_prompt=ends_prompt,
            decodes=decodes,
            freed_slots=any(row.freed_slot for row in rows),
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
    def common_budget(self) -> int | None:
        """How many entries every query of every row may see; None where they differ."""
        allowed = {number for entries in self.entries for number in (entries[0], entries[-1])}
        return allowed.pop() if len(allowed) == 1 else None

    @cached_property
    def single(self) -> bool:
        """One new token a row."""
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

    @cached_property
    def held(self) -> list[int]:
        """Entries of each row after the cut."""
        return [after if target is None else target for after, target in zip(self.after, self.targets, strict=True)]

    def groups(self) -> list[tuple[list[int] | None, int]]:
        """Rows that are cut to the same size, with that size; None stands for all rows."""
        by_target: dict[int, list[int]] = {}
        for row, target in enumerate(self.targets):
            if target is not None:
                by_target.setdefault(target, []).append(row)
        return [(None if len(rows) == self.rows else rows, target) for target, rows in by_target.items()]

    def sink_shifts(self) -> list[int]:
        """By how many positions the sinks of each row are nearer to its last query in the cache than in the text."""
        return [max(0, seen - entries[0]) for seen, entries in zip(self.seen, self.entries, strict=True)]

    # Tensors that several layers need are made once per device.

    def once(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is made on first use and shared by the layers of a device."""
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

    def decode_positions(self, heads: int, device: torch.device) -> Tensor:
        """The position of the one new token of each row, repeated for each of its KV heads: `[rows * heads]` int32."""

        def make() -> Tensor:
            return self.query_positions(device)[:, 0].repeat_interleave(heads)

        return self.once("decode_positions", device, make)

    def unrotate_angles(self, inv_freq: Tensor, dtype: torch.dtype, *distances: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines that undo the rotation of the keys which stand so many positions before each query.

        `[rows, 1, len(distances) * queries, rotary_dim / 2]`, the queries of one distance behind those of the one
        before; of position 0 where a distance leads before the first token.
        """

        def make() -> Tensor:
            queries = self.query_positions(inv_freq.device)
            positions = torch.cat([(queries - distance).clamp(min=0) for distance in distances], dim=1)
            return torch.stack(angles(-positions[:, None], inv_freq, dtype))

        cos, sin = self.once(f"unrotate_angles {distances}", inv_freq.device, make)
        return cos, sin

    def budgets(self, device: torch.device) -> Tensor:
        """`[rows, queries + 1]` int64: how many entries each query may see, and then the next one."""
        return self.once("budgets", device, lambda: torch.tensor(self.entries, device=device))

    def following(self, device: torch.device) -> Tensor:
        """`[rows, 1, 1]` int64: the position of the next query."""
        return self.once("following", device, lambda: torch.tensor(self.seen, device=device)[:, None, None])

    def free_slots(self, device: torch.device) -> Tensor:
        """`[rows, 1]` int64: the first slot behind what is held after the cut."""
        return self.once("free_slots", device, lambda: torch.tensor(self.held, device=device)[:, None])

    def cut_rows(self, device: torch.device) -> Tensor:
        """`[rows, 1]` bool: which rows lose an entry."""
        cut = [target is not None for target in self.targets]
        return self.once("cut_rows", device, lambda: torch.tensor(cut, device=device)[:, None])

    def slots(self, device: torch.device) -> Tensor:
        """`[rows, queries]` int64: where new entries go. Padding goes behind what the row holds."""

        def make() -> Tensor:
            before = torch.tensor(self.before, device=device)[:, None]
            if self.real is None:
                return before + torch.arange(self.queries, device=device)
            real = self.real.to(device)
            after = torch.tensor(self.after, device=device)[:, None]
            return torch.where(real, before + real.cumsum(-1) - 1, after + (~real).cumsum(-1) - 1)

        return self.once("slots", device, make)

    def in_use(self, buffer: Tensor) -> Tensor:
        """The rows and slots of a buffer that are in use; the buffer itself where all are."""
        if buffer.shape[0] == self.rows and buffer.shape[2] == self.used:
            return buffer
        return buffer[: self.rows, :, : self.used]

    def put(self, buffer: Tensor, value: Tensor | float, free: Tensor) -> None:
        """Write the new entries into a buffer `[rows, heads, slots, ...]`.

        value: `[rows, heads, queries, ...]`, or one number for all. free: `[rows, sets]` int64, the slot that a single
        new token takes.
        """
        rows = self.rows
        if self.level and not (self.single and self.freed_slots):
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
