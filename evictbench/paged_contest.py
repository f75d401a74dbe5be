"""A ragged policy whose entries compete (`Policy.contested`): the prompt, the cut at its end, then token by token.

Until its end a row's prompt is held plain (`paged_prompt`): whole, or, where it is bounded, as much of it as the next
query sees. At its last query the places of each layer are divided among its heads, and pages begin. From then on one
entry in is one out, in every head (`paged_places`), and what goes joins its head's means (`paged_means`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.deadlines import rank_by_score
from evictbench.errors import UserError
from evictbench.paged_attention import attend_one
from evictbench.paged_cut import Cut, into_pages
from evictbench.paged_means import run_through
from evictbench.paged_places import Places
from evictbench.paged_prompt import Prompt, attend_prompt, last_mass, taken, without_end
from evictbench.pages import NEVER, PagePool
from evictbench.placement import in_slot_order
from evictbench.policy import Arriving, Division, Rivals, SlotTensor

if TYPE_CHECKING:
    from evictbench.paged import PagedCache, PagedLayer
    from evictbench.passes import Pass


@dataclass(frozen=True)
class Terms:
    """What a row's budget comes to. prompt: its length; budget: of the prompt's queries; room: means of each head;
    places: of each pool, before they are divided; sparse: a prompt's query does not see what a pool of that size would
    have lost; bounded: and that is dropped."""

    prompt: int
    budget: int
    room: int
    places: int
    sparse: bool
    bounded: bool


class Contest:
    """What a PagedCache does for such a policy."""

    def __init__(self, cache: PagedCache, mode: str) -> None:
        self.cache = cache
        self.policy = cache.policy
        self.mode = mode
        self.window = int(cache.policy.recent(0))
        self.state = cache.policy.slot_state(cache.shape)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence."""
        self.terms: list[Terms] = []
        self._places: dict[tuple[torch.device, tuple[int, ...]], Places] = {}

    def begin(self, prompts: Sequence[int]) -> None:
        """At the start of a prompt's pass: settle each row's terms, which hold from its first token on (how much
        padding there is before it shows only then). Raises UserError for an impossible budget."""
        self.terms = [self._of(prompt) for prompt in prompts]

    def _of(self, prompt: int) -> Terms:
        assert self.cache.budget is not None
        budget = self.cache.budget.at(prompt, prompt)
        if budget < self.cache.minimum:
            raise UserError(
                f"{self.policy.name} needs a budget of at least {self.cache.minimum} entries on this model "
                f"({self.cache.minimum - 1} are protected), not {budget}."
            )
        room = self.policy.summaries(budget)
        sparse = self.mode != "dense" and prompt > budget
        return Terms(
            prompt=prompt,
            budget=budget,
            room=room,
            places=budget - self.policy.sinks - self.window - room,
            sparse=sparse,
            bounded=sparse and self.mode == "bounded",
        )

    def check(self, row: int, mean: float) -> None:
        """The guard: a decode query of this row sees so many entries, mean over heads."""
        assert self.cache.budget is not None
        allowed = self.cache.budget.at(self.terms[row].prompt, self.cache.seen[row] + 1)
        if mean > allowed + 1e-6:
            raise RuntimeError(
                f"{self.policy.name} let a query see {mean:.2f} entries a head, where the budget is {allowed}."
            )

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
        entries = {"keys": keys, "values": values, **self.policy.judge(arriving)}
        if not cache.prompt_done:
            output = self._read(layer, step, query, entries, scaling)
        elif step.single:
            output = self._one(layer, step, query, entries, scaling)
        else:
            output = self._in_turn(layer, step, query, entries, scaling)
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
            terms, first = self.terms[row], step.seen[row] - count
            prompt = layer.prompts.setdefault(row, Prompt(self.cache.count_bytes))
            new = slice(step.queries - count, step.queries)
            own = {name: tensor[row, :, new] for name, tensor in entries.items()}
            own["positions"] = positions[row, new].expand(self.cache.shape.kv_heads, -1)
            prompt.append(without_end(own, own), 0 if terms.bounded else terms.prompt)
            seen = prompt.length
            index, dies = None, False
            if terms.sparse:
                seen -= self._gone(terms, first) - self._dropped(terms, first)
                index = prompt.seen(first, seen)
                dies = self._gone(terms, step.seen[row]) > self._gone(terms, first)
            if dies:
                rivals = Rivals(
                    state={name: taken(prompt.held(name), index) for name in self.state},
                    positions=taken(prompt.held("positions"), index),
                    first=first,
                    new=count,
                    places=terms.places,
                )
                deadlines = self.policy.leaving(rivals).to(torch.int32)
                if index is None:
                    prompt.held("deadlines").copy_(deadlines)
                else:
                    prompt.held("deadlines").scatter_(1, index, deadlines)
            own_query = query[row, :, new]
            output[row, :, new] = attend_prompt(prompt, index, own_query, first, scaling, dies)
            if step.ends_prompt:
                prompt.mass = last_mass(prompt, own_query[:, -1:], scaling)
        return output

    def _gone(self, terms: Terms, query: int) -> int:
        """How many entries of each head a prompt's query no longer sees."""
        return max(0, query - self.window + 1 - self.policy.sinks - terms.places)

    def _dropped(self, terms: Terms, query: int) -> int:
        """How many of those are no longer held."""
        return self._gone(terms, query) if terms.bounded else 0

    def _one(
        self, layer: PagedLayer, step: Pass, query: Tensor, entries: Mapping[str, Tensor], scaling: float
    ) -> Tensor:
        """One token of every row, which leaves what follows to the end of the pass."""
        pool = layer.pool
        assert pool is not None
        heads, device = self.cache.shape.kv_heads, query.device
        positions = step.once("by_owner", device, lambda: step.query_positions(device)[:, 0].repeat_interleave(heads))
        pool.put(
            positions.shape[0],
            {
                **{name: tensor.flatten(0, 2) for name, tensor in entries.items()},
                "positions": positions,
                "deadlines": step.once("never", device, lambda: torch.full_like(positions, NEVER)),
                "bias": step.once("no bias", device, lambda: self._bias(positions)),
            },
        )
        return attend_one(pool, query, positions, scaling)

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
        layers = self.cache.layers
        if not self.cache.prompt_done:
            if not step.ends_prompt:
                self._drop(step, step.seen)
                return
            self._drop(step, [seen - 1 for seen in step.seen])
            for layer in layers:
                self._cut(layer)
        elif not step.single:
            return
        by_device: dict[torch.device, list[PagePool]] = {}
        for layer in layers:
            assert layer.pool is not None
            by_device.setdefault(layer.pool.device, []).append(layer.pool)
        held = [owner for row, seen in enumerate(step.seen) if seen for owner in self.cache.owners(row)]
        for device, pools in by_device.items():
            some = None if min(step.seen) else torch.tensor(held, dtype=torch.int64, device=device)
            self._decide(pools, step.seen, some)

    def _decide(self, pools: list[PagePool], following: Sequence[int], owners: Tensor | None) -> None:
        """What leaves before the rows' next queries, at these positions."""
        assert self.cache.budget is not None
        device, heads, rows = pools[0].device, self.cache.shape.kv_heads, len(following)
        grown = [
            self.cache.budget.at(terms.prompt, at + 1) - terms.budget
            for terms, at in zip(self.terms, following, strict=True)
        ]
        by_row = torch.tensor([list(following), grown]).repeat_interleave(heads, dim=1)
        both = torch.zeros((2, pools[0].length.shape[0]), dtype=torch.int64)
        both[:, : rows * heads] = by_row
        both = both.to(device)
        key = device, tuple(id(pool) for pool in pools)
        if key not in self._places:
            self._places[key] = Places(self.policy, pools, tuple(self.state))
        self._places[key].decide(both[0].to(torch.int32), self.window, both[1], owners, rows * heads)

    def _drop(self, step: Pass, following: Sequence[int]) -> None:
        """Of bounded prompts: let go of what these queries do not see, into means, in the order in which it left."""
        for row, (at, count) in enumerate(zip(following, step.counts, strict=True)):
            terms = self.terms[row]
            first = step.seen[row] - count
            gone = self._gone(terms, at) - self._gone(terms, first) if terms.bounded and count else 0
            if gone <= 0:
                continue
            by_device: dict[torch.device, list[Prompt]] = {}
            for layer in self.cache.layers:
                prompt = layer.prompts[row]
                by_device.setdefault(prompt.buffers["keys"].device, []).append(prompt)
            for prompts in by_device.values():
                if terms.room:
                    self._join(prompts, gone, terms.room)
                for prompt in prompts:
                    alive = prompt.held("deadlines") > at
                    prompt.keep(in_slot_order(alive, prompt.length - gone))

    def _join(self, prompts: Sequence[Prompt], gone: int, room: int) -> None:
        """The `gone` entries that left first join the means of their heads, in several layers at once."""
        heads = self.cache.shape.kv_heads
        leaving = {"keys": [], "values": []}  # type: dict[str, list[Tensor]]
        for prompt in prompts:
            index = prompt.held("deadlines").argsort(dim=-1, stable=True)[:, :gone]
            for name, found in leaving.items():
                found.append(taken(prompt.held(name), index))
            if prompt.means is None:
                wide = torch.promote_types(prompt.buffers["keys"].dtype, torch.float32)
                made = prompt.buffers["keys"].new_zeros((heads, room, prompt.buffers["keys"].shape[-1]), dtype=wide)
                prompt.set_means((made, made.clone(), made.new_zeros((heads, room))))
        parts = zip(*(prompt.means for prompt in prompts if prompt.means is not None), strict=True)
        keys, values, counts = (torch.cat(part) for part in parts)
        run_through(self.policy, (keys, values, counts), torch.cat(leaving["keys"]), torch.cat(leaving["values"]))
        for i, prompt in enumerate(prompts):
            own = slice(i * heads, (i + 1) * heads)
            prompt.set_means((keys[own].clone(), values[own].clone(), counts[own].clone()))

    def _cut(self, layer: PagedLayer) -> None:
        """At a prompt's end: divide the places of a layer, and move what stays into pages."""
        assert layer.pool is not None
        for row, terms in enumerate(self.terms):
            prompt = layer.prompts.pop(row, None)
            into_pages(layer.pool, self.cache.owners(row), self._chosen(layer, prompt, terms), prompt, self.policy)
            if prompt is not None:
                prompt.free()

    def _chosen(self, layer: PagedLayer, prompt: Prompt | None, terms: Terms) -> Cut:
        if prompt is None:
            return Cut(torch.full((self.cache.shape.kv_heads,), terms.places), terms.room, None)
        assert prompt.mass is not None
        last, positions = terms.prompt - 1, prompt.held("positions")
        competes = (positions >= self.policy.sinks) & (positions <= last - self.window)
        worth = self.policy.worth({name: prompt.held(name) for name in self.state}, last - positions)
        crowded = terms.prompt > terms.budget and not terms.bounded
        division = Division(layer.index, prompt.mass, worth, competes, terms.places, crowded)
        places = self.policy.divide(division).to(worth.device)
        rank = rank_by_score(worth.masked_fill(~competes, -torch.inf), positions)
        return Cut(places, terms.room, ~competes | (rank < places[:, None]))

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
        more = {**self.state, "bias": SlotTensor(wide, fill=-torch.inf)}
        return PagePool(owners, like, self.cache.count_bytes, more, beside)
