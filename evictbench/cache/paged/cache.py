"""PagedCache: the cache of a policy whose heads keep different numbers of entries.

The step, in every layer: ask the policy until when the new entries are seen, and the last one before them, about
which it may know more by now; attend, every query to what it may see; give the place of what no later query sees to
new entries. Deadlines decide all of it, so that any chunk size gives the token-at-a-time result. A prompt is never
held whole: after each chunk its heads hold what the next query sees. Where a policy's entries compete for places, all
this is otherwise: see `paged_contest`.

    cache = PagedCache(model, policy, "25%")
    with cache.listening():        # sets the hooks that the policy reads by, and removes them
        model.generate(**inputs, past_key_values=cache)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evictbench.cache.clock import POLICY, REST, SIGNALS
from evictbench.cache.forward_plan import Occupancy, Pass
from evictbench.cache.paged.competition import Contest
from evictbench.cache.paged.expiry import Late, expire
from evictbench.cache.paged.pool import EMPTY, PagePool
from evictbench.cache.paged.stack import Boards
from evictbench.cache.slots.cache import EvictionCache
from evictbench.cache.slots.layer import SlotLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.paged.prompt import Prompt
    from evictbench.policy.base import Policy
    from evictbench.policy.budget import Budget
    from evictbench.policy.step import Tap


def allotted(policy: Policy, budget: Budget | None, prompt: int) -> float:
    """What a budget comes to for a prompt of so many tokens: a share, or N entries, of the length that the suite states
    or else of the prompt. Raises UserError where the policy cannot have it."""
    length = max(prompt, policy.stated_length or 0)
    if budget is None or budget.tokens is None:
        return policy.allot(1.0 if budget is None else budget.share or 1.0, length)
    return policy.allot(min(1.0, budget.tokens / length), length)


class PagedLayer(SlotLayer):
    """The pages of one layer, made when its first keys arrive, or at the end of prompts that are held plain until then
    (by row)."""

    cache: PagedCache
    pool: PagePool | None = None

    def __init__(self, cache: PagedCache, index: int) -> None:
        super().__init__(cache, index)
        self.prompts: dict[int, Prompt] = {}

    def forget(self) -> None:
        """Free everything."""
        super().forget()
        self.pool, self.prompts = None, {}

    def nbytes(self) -> int:
        """Bytes of every storage this layer holds."""
        pages = 0 if self.pool is None else self.pool.nbytes()
        return pages + sum(prompt.nbytes() for prompt in self.prompts.values())


class PagedCache(EvictionCache):
    """A KV cache in pages; arguments as of EvictionCache, for a policy that is `ragged`.

    What the budget comes to is the policy's (`allotted`), for each row when its prompt begins. Nothing is cut to it,
    and occupancy is measured: the largest of a decode query's heads, and their mean. The prompt is read in chunks that
    hold what the next query sees, whatever `prefill` says.
    Bytes held: at most 1.15 times those of the kept keys and values where heads keep 150 entries or more on average.
    Where a policy's entries are `contested`, all is cut to the budget at the end of the prompt, which is held as
    `prefill` says, and a query that sees more, mean over heads, is a RuntimeError.
    """

    layers: list[PagedLayer]  # type: ignore[assignment]

    def __init__(self, model: PreTrainedModel, policy: Policy, budget: Any = None, **settings: Any) -> None:
        policy.fit(model.config)
        prefill = settings.get("prefill", "native")
        self.mode: str = policy.prefill if prefill == "native" else prefill
        super().__init__(model, policy, budget, **settings)
        self.model = model

    def new_layer(self, index: int) -> PagedLayer:
        """A layer without entries."""
        return PagedLayer(self, index)

    def new_pool(self, rows: int, like: Tensor) -> PagePool:
        """An empty pool with owners for so many rows. like: keys."""
        if self.contest is not None:
            return self.contest.new_pool(rows, like)
        return PagePool(rows * self.shape.kv_heads, like, self.count_bytes)

    def reset(self) -> None:
        """Forget every sequence and free every page."""
        super().reset()
        self.boards = Boards()
        self.contest = Contest(self, self.mode) if self.policy.contested else None
        self.late = Late(self) if self.policy.decides_late else None
        self.allotted: list[float] = []
        self.read: dict[int, Tensor] = {}
        self.seen_by_heads: list[tuple[int, float]] = []

    def entries(self, row: int, seen: int) -> int:
        """Nothing is cut to a budget: what a query may see is all there is."""
        return seen + 1

    def kept(self, layer: int, row: int = 0) -> Tensor:
        """The positions that the next query sees, by KV head, ascending and padded with -1 behind: `[kv_heads, most]`
        int64."""
        pool, following = self.layers[layer].pool, self.seen[row]
        if (prompt := self.layers[layer].prompts.get(row)) is not None:
            heads = list(zip(prompt.held("positions"), prompt.held("deadlines"), strict=True))
        else:
            assert pool is not None
            freed = None if self.contest is None else pool.reusable
            heads = [pool.alive(owner, freed) for owner in self.owners(row)]
        found = [positions[deadlines > following].long().sort().values for positions, deadlines in heads]
        return torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=EMPTY)

    def nbytes(self) -> int:
        """Bytes of everything held: keys, values, positions, deadlines, what says whose each page is."""
        return sum(layer.nbytes() for layer in self.layers)

    def row_bytes(self, row: int) -> int:
        """Bytes of one row's part of what is held: that of its pages among those in use."""
        return sum(layer.pool.bytes_of(self.owners(row)) for layer in self.layers if layer.pool is not None)

    def owners(self, row: int) -> range:
        """Of a row's KV heads, their numbers in every pool."""
        return range(row * self.shape.kv_heads, (row + 1) * self.shape.kv_heads)

    def pools(self) -> dict[torch.device, dict[int, PagePool]]:
        """The pools of each device, by layer."""
        found: dict[torch.device, dict[int, PagePool]] = {}
        for layer in self.layers:
            if layer.pool is not None:
                found.setdefault(layer.pool.device, {})[layer.index] = layer.pool
        return found

    def by_owner(self, step: Pass, device: torch.device) -> Tensor:
        """The positions of one new token of each row, for all its heads: `[owners]` int32."""
        heads = self.shape.kv_heads
        return step.once("by_owner", device, lambda: step.query_positions(device)[:, 0].repeat_interleave(heads))

    def allotments(self, step: Pass, device: torch.device) -> Tensor:
        """What each row is allotted, `[rows]`."""
        return step.once("allotted", device, lambda: torch.tensor(self.allotted, device=device))

    # What the policy reads.

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the policy reads what it declares (`Policy.taps`) of every forward pass through this cache."""
        from evictbench.cache.hooks import tapped

        with tapped(self.model, self.policy.taps, self._take):
            yield

    def _take(self, layer: int, name: Tap, tensor: Tensor) -> Tensor | None:
        if self.clock is not None:
            self.clock.lap(REST, tensor.device)
        keeps = self.late is not None and self.prompt_done and tensor.shape[1] == 1
        self.read[layer] = tensor if keeps else self.policy.read(layer, name, tensor)
        changed = self.policy.before_rotation(tensor) if name == "pre_rope_queries" else None
        if self.clock is not None:
            self.clock.lap(SIGNALS, tensor.device)
        return changed

    # One forward pass.

    def begin(self, new: Tensor, real: Tensor | None) -> Pass:
        """Before the first layer attends: plan the pass; where each row has one token, see that it has a slot."""
        rows = new.shape[0]
        if self.current is not None:
            raise RuntimeError("The last forward pass through this cache did not finish; reset() it first.")
        if not self.seen:
            self.seen, self.held, self.prompts = [0] * rows, [0] * rows, [0] * rows
            self.holes = [False] * rows
            self.occupancy = [Occupancy() for _ in range(rows)]
            self.known = [None] * rows
        if rows != len(self.seen):
            raise RuntimeError(f"This cache holds {len(self.seen)} sequences and was given {rows}.")
        step = Pass.plan(self, new.shape[2], real)
        if self.contest is not None and not self.prompt_done:
            self.contest.begin(self.prompts)
            self.allotted = [1.0] * rows
        elif not self.allotted:
            self.allotted = [allotted(self.policy, self.budget, length) for length in self.prompts]
        self.seen_by_heads = self._open_pages(rows) if self.in_place(step) else []
        if self.contest is not None and self.in_place(step):
            self.contest.open(step)
        elif self.late is not None and self.in_place(step):
            self.late.open(step, new)
        self.current = step
        return step

    def in_place(self, step: Pass) -> bool:
        """Every row has one new token, and others in pages."""
        return step.single and (self.columns > 0 if self.contest is None else self.prompt_done)

    def _open_pages(self, rows: int) -> list[tuple[int, float]]:
        """Give a page to each head whose next entry has no slot; how many entries the heads of each row will see, the
        most and the mean over layers and heads. The host waits once for a device, and not for each layer."""
        visible: list[Tensor] = []
        for pools in map(list, map(dict.values, self.pools().values())):
            for pool in pools:
                pool.trim()
            wanting, seen = self.boards.of(pools).room(rows * self.shape.kv_heads).cpu()
            wanted: dict[int, dict[int, int]] = {}
            for index, owner in wanting.nonzero().tolist():
                wanted.setdefault(index, {})[owner] = 1
            for index, pages in wanted.items():
                pools[index].take(pages)
            visible.append(seen + 1)
        by_row = torch.cat(visible).view(-1, rows, self.shape.kv_heads).transpose(0, 1).flatten(1)
        found = list(zip(by_row.amax(-1).tolist(), by_row.double().mean(-1).tolist(), strict=True))
        if self.contest is not None:
            for row, (_, mean) in enumerate(found):
                self.contest.check(row, mean)
        return found

    def attend(
        self, layer: PagedLayer, query: Tensor, keys: Tensor, values: Tensor, real: Tensor | None, scaling: float
    ) -> Tensor:
        """Attention of one layer, and what follows from it; shapes as of `evictbench.cache.attention.attend`, but the
        output is `[rows, heads, queries, head_dim]`."""
        step = self.begin(keys, real) if layer.index == 0 else self.current
        assert step is not None
        if self.contest is not None:
            output = self.contest.attend(layer, step, query, keys, values, scaling)
        elif self.late is not None and self.in_place(step):
            output = self.late.attend(layer, step, query, keys, values, scaling)
        else:
            output = expire(self, layer, step, query, keys, values, scaling)
        if layer.index == self.shape.layers - 1:
            self._close(step)
        if self.clock is not None:
            self.clock.lap(POLICY, query.device)
        return output

    def take_read(self, layer: int, device: torch.device) -> Tensor | None:
        """What the policy has read of this layer in this pass, if it reads."""
        read = self.read.pop(layer, None)
        if read is None and self.policy.taps:
            raise RuntimeError(
                f"{self.policy.name} reads more than attention sees: run the model inside `with cache.listening():`."
            )
        return None if read is None else read.to(device)

    def _close(self, step: Pass) -> None:
        if self.prompt_done:
            for occupancy, (largest, mean) in zip(self.occupancy, self.seen_by_heads, strict=False):
                occupancy.add(largest, mean)
        self.seen = step.seen
        self.held = list(step.seen)
        self.columns += step.queries
        self.prompt_done = self.prompt_done or step.ends_prompt
        self.current = None

    # Rows that come and go.

    def admit(self, prompt: PagedCache) -> int:
        """Copy what a one-row cache holds after its prompt into the next free row; returns that row."""
        row, rows = len(self.seen), self.row_capacity
        if rows is None or row >= rows:
            raise RuntimeError(f"All {rows} rows of this cache are taken.")
        for source, target in zip(prompt.layers, self.layers, strict=True):
            assert source.pool is not None
            if target.pool is None:
                target.pool = self.new_pool(rows, source.pool.buffers["keys"])
            target.pool.copy_from(source.pool, self.owners(row).start)
        self.seen.append(prompt.seen[0])
        self.held.append(prompt.held[0])
        self.prompts.append(prompt.prompts[0])
        self.holes.append(False)
        self.occupancy.append(Occupancy())
        self.known.append(None)
        self.allotted.append(prompt.allotted[0])
        if self.contest is not None and prompt.contest is not None:
            self.contest.terms.append(prompt.contest.terms[0])
        self.columns = max(self.columns, prompt.columns)
        self.prompt_done = True
        return row

    def release(self, row: int) -> None:
        """End the sequence in a row; the last row takes its place."""
        last = len(self.seen) - 1
        for layer in self.layers:
            if layer.pool is not None:
                layer.pool.move_owners(self.owners(last).start, self.owners(row).start, self.shape.kv_heads)
        lists: tuple[list[Any], ...] = (
            self.seen,
            self.held,
            self.prompts,
            self.holes,
            self.occupancy,
            self.known,
            self.allotted,
            *([] if self.contest is None else [self.contest.terms]),
        )
        for items in lists:
            items[row] = items[last]
            items.pop()
