"""A ragged policy whose entries compete (`Policy.contested`): the prompt, the cut at its end, then token by token.

Until its end a row's prompt is held plain (`paged_prompt`): whole, or, where it is bounded, as much of it as the next
query sees. At its last query the places of each layer are divided among its heads, and pages begin. From then on one
entry in is one out, in every head (`paged_places`), and what goes joins its head's means (`paged_means`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.clock import ATTENTION, POLICY
from evictbench.cache.paged.attention import attend_one
from evictbench.cache.paged.centroids import RESTS
from evictbench.cache.paged.head_budget import Terms, decide
from evictbench.cache.paged.pool import NEVER, PagePool
from evictbench.cache.paged.prefill import cut, let_go, read_chunk
from evictbench.cache.paged.prompt import Prompt
from evictbench.cache.paged.stack import Board
from evictbench.policy.step import Arriving, SlotTensor

if TYPE_CHECKING:
    from evictbench.cache.forward_plan import Pass
    from evictbench.cache.paged.cache import PagedCache, PagedLayer


class Contest:
    """What a PagedCache does for such a policy."""

    def __init__(self, cache: PagedCache, mode: str) -> None:
        self.cache = cache
        self.policy = cache.policy
        self.mode = mode
        self.window = int(cache.policy.recent(0))
        self.slot_tensors = cache.policy.slot_state(cache.shape)
        self.state = tuple(self.slot_tensors)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence."""
        self.terms: list[Terms] = []
        self._arriving: list[Arriving] = []
        self._slots: dict[int, Tensor] = {}
        self._biases: dict[int, Tensor] = {}
        self._entered: dict[torch.device, tuple[Board, Tensor]] = {}

    def begin(self, prompts: Sequence[int]) -> None:
        """At the start of a prompt's pass: settle each row's terms, which hold from its first token on (how much
        padding there is before it shows only then). Raises UserError for an impossible budget."""
        cache = self.cache
        assert cache.budget is not None
        self.terms = [Terms.of(self.policy, cache.budget, cache.minimum, self.mode, prompt) for prompt in prompts]

    def check(self, row: int, mean: float) -> None:
        """The guard: a row's next query sees so many entries, mean over heads."""
        self.terms[row].check(self.policy, self.cache.seen[row], mean)

    # Attention.

    def attend(
        self, layer: PagedLayer, step: Pass, query: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> Tensor:
        """One layer's attention and what follows from it; the output like query, `[rows, heads, queries, head_dim]`."""
        cache = self.cache
        arriving = Arriving(
            layer=layer.index,
            shape=cache.shape,
            positions=step.query_positions(keys.device),
            allotted=step.once("no allotment", keys.device, lambda: torch.zeros(step.rows, device=keys.device)),
            read=cache.take_read(layer.index, keys.device),
        )
        entries = {"keys": keys, "values": values}
        if cache.prompt_done and step.single:
            self._arriving.append(arriving)
            output = self._one(layer, step, query, entries, scaling)
        else:
            attend = self._in_turn if cache.prompt_done else self._read
            output = attend(layer, step, query, {**entries, **self.policy.judge(arriving)}, scaling)
        if layer.index == cache.shape.layers - 1:
            self._close(step)
        return output

    def _read(
        self, layer: PagedLayer, step: Pass, query: Tensor, entries: Mapping[str, Tensor], scaling: float
    ) -> Tensor:
        """A part of the prompt."""
        output = torch.zeros_like(query)
        positions = step.query_positions(query.device)
        if step.ends_prompt:
            layer.pool = self.new_pool(max(self.cache.row_capacity or 0, step.rows), entries["keys"])
        for row, count in enumerate(step.counts):
            if count == 0:
                continue
            prompt = layer.prompts.setdefault(row, Prompt(self.cache.count_bytes))
            new = slice(step.queries - count, step.queries)
            own = {name: tensor[row, :, new] for name, tensor in entries.items()}
            own["positions"] = positions[row, new].expand(self.cache.shape.kv_heads, -1)
            output[row, :, new] = read_chunk(
                self.policy,
                prompt,
                self.terms[row],
                query[row, :, new],
                own,
                step.seen[row] - count,
                scaling,
                step.ends_prompt,
                self.cache.clock,
            )
        return output

    def _one(
        self, layer: PagedLayer, step: Pass, query: Tensor, entries: Mapping[str, Tensor], scaling: float
    ) -> Tensor:
        """One token of every row; it is judged, and what follows from it is decided, at the end of the pass."""
        pool, slots = layer.pool, self._slots[layer.index]
        assert pool is not None
        for name, entry in entries.items():
            pool.buffers[name].flatten(0, 1).index_copy_(0, slots, entry.flatten(0, 2))
        now, clock = self.cache.by_owner(step, query.device), self.cache.clock
        if clock is not None:
            clock.lap(POLICY, query.device)
        output = attend_one(pool, query, now, scaling, self._biases.get(layer.index))
        if clock is not None:
            clock.lap(ATTENTION, query.device)
        return output

    def open(self, step: Pass) -> None:
        """Before a pass in which each row decodes a token: find the slots of all layers' new entries."""
        for device, pools in self.cache.pools().items():
            board, positions = self.cache.boards.of(pools.values()), self.cache.by_owner(step, device)
            slots, numbers = board.enter(positions.shape[0], positions)
            self._slots.update(zip(pools, slots.unbind(), strict=True))
            if device.type != "cuda":
                bias = board.bias(positions, self.cache.shape.group, board.slots["bias"].dtype)
                self._biases.update(zip(pools, bias, strict=True))
            self._entered[device] = board, numbers

    def _bias(self, positions: Tensor) -> Tensor:
        pool = next(layer.pool for layer in self.cache.layers if layer.pool is not None)
        return torch.zeros(positions.shape, dtype=pool.buffers["bias"].dtype, device=positions.device)

    def _in_turn(
        self, layer: PagedLayer, step: Pass, query: Tensor, entries: Mapping[str, Tensor], scaling: float
    ) -> Tensor:
        """Several tokens after the prompt, one after the other, so that each sees what it would see alone."""
        pool = layer.pool
        assert pool is not None
        output, heads = torch.zeros_like(query), self.cache.shape.kv_heads
        positions = step.query_positions(query.device)
        for at in range(step.queries):
            rows = [row for row, count in enumerate(step.counts) if at >= step.queries - count]
            everyone = len(rows) == step.rows
            if not rows:
                continue
            owners = torch.tensor([owner for row in rows for owner in self.cache.owners(row)], device=query.device)
            now = positions[:, at].repeat_interleave(heads)
            own = {name: tensor[:, :, at].flatten(0, 1)[owners] for name, tensor in entries.items()}
            own["positions"] = now[owners]
            own["deadlines"] = torch.full_like(own["positions"], NEVER)
            own["bias"] = self._bias(own["positions"])
            wanting = owners[pool.wants_page(step.rows * heads)[owners]]
            pool.take(dict.fromkeys(wanting.tolist(), 1))
            pool.put(owners, own)
            found = attend_one(pool, query[:, :, at : at + 1].contiguous(), now, scaling)
            output[rows, :, at] = found[rows, :, 0]
            seen = [step.seen[row] - step.queries + at + 1 for row in range(step.rows)]
            self._decide([pool], seen, None if everyone else owners)
        return output

    # After a pass.

    def _close(self, step: Pass) -> None:
        if not self.cache.prompt_done:
            if not step.ends_prompt:
                self._drop(step, step.seen)
                return
            self._drop(step, [seen - 1 for seen in step.seen])
            for layer in self.cache.layers:
                cut(self.policy, layer, self.terms, self.state)
        elif step.single:
            self._judge()
        else:
            return
        held = [owner for row, seen in enumerate(step.seen) if seen for owner in self.cache.owners(row)]
        for device, pools in self.cache.pools().items():
            some = None if min(step.seen) else torch.tensor(held, dtype=torch.int64, device=device)
            self._decide(list(pools.values()), step.seen, some)

    def _judge(self) -> None:
        """What the policy judges by of the tokens that decode has just written, all layers of a device at once."""
        by_device: dict[torch.device, list[Arriving]] = {}
        for arriving in self._arriving:
            by_device.setdefault(arriving.positions.device, []).append(arriving)
        self._arriving = []
        for device, arrivals in by_device.items():
            board, numbers = self._entered[device]
            for name, judged in self.policy.judge_together(arrivals).items():
                board.slots[name].flatten(0, 1).index_copy_(0, numbers, judged.flatten(0, 3))

    def _decide(self, pools: list[PagePool], following: Sequence[int], owners: Tensor | None) -> None:
        """What leaves before the rows' next queries, at these positions."""
        device, heads, rows = pools[0].device, self.cache.shape.kv_heads, len(following)
        grown = [terms.allowed(at) - terms.entries for terms, at in zip(self.terms, following, strict=True)]
        by_row = torch.tensor([list(following), grown]).repeat_interleave(heads, dim=1)
        both = torch.zeros((2, pools[0].length.shape[0]), dtype=torch.int64)
        both[:, : rows * heads] = by_row
        both = both.to(device)
        decide(
            self.policy,
            self.cache.boards.of(pools),
            both[0].to(torch.int32),
            both[1],
            window=self.window,
            states=self.state,
            owners=owners,
            rows=rows * heads,
        )

    def _drop(self, step: Pass, following: Sequence[int]) -> None:
        """Of bounded prompts: let go of what these queries do not see, into means, in the order in which it left."""
        for row, (at, count) in enumerate(zip(following, step.counts, strict=True)):
            terms = self.terms[row]
            gone = terms.dropped(at) - terms.dropped(step.seen[row] - count) if count else 0
            if gone <= 0:
                continue
            by_device: dict[torch.device, list[Prompt]] = {}
            for layer in self.cache.layers:
                prompt = layer.prompts[row]
                by_device.setdefault(prompt.buffers["keys"].device, []).append(prompt)
            for prompts in by_device.values():
                let_go(self.policy, prompts, gone, at, terms.room)

    def new_pool(self, rows: int, like: Tensor) -> PagePool:
        """An empty pool for so many rows. like: keys."""
        owners = rows * self.cache.shape.kv_heads
        wide = torch.promote_types(like.dtype, torch.float32)
        most = self.policy.summaries(2**31)
        beside = {
            "places": torch.zeros(owners, dtype=torch.int64),
            "room": torch.zeros(owners, dtype=torch.int64),
            "counts": torch.zeros((owners, most), dtype=wide),
        }
        if wide != like.dtype:
            beside |= {name: torch.zeros((owners, most, like.shape[-1]), dtype=wide) for name in RESTS.values()}
        more = {**self.slot_tensors, "bias": SlotTensor(wide, fill=-torch.inf)}
        return PagePool(owners, like, self.cache.count_bytes, more, beside)
