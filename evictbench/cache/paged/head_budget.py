"""HeadBudgetCache: the entries of a head compete in a pool whose size is set for each prompt.

Until then a row's prompt lies plain (`prompt`): whole or, where it is bounded, as much of it as the next query sees.
Each layer's budget is divided among its heads: before the layer attends to the prompt, or at its last query. At the end
the entries come into pages. From then on one entry in
is one out, in every head (`competition`), and what leaves joins its head's centroids (`centroids`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evictbench.cache.clock import ATTENTION, POLICY
from evictbench.cache.forward_plan import ForwardPlan
from evictbench.cache.paged.attention import attend_decode
from evictbench.cache.paged.cache import PagedCache, at_row
from evictbench.cache.paged.centroids import RESIDUALS
from evictbench.cache.paged.competition import evict_worst
from evictbench.cache.paged.layer import PagedLayer
from evictbench.cache.paged.pool import PagePool
from evictbench.cache.paged.prefill import drop_hidden, move_into_pages, read_chunk
from evictbench.cache.paged.prompt import Prompt
from evictbench.cache.paged.stack import StackedPools
from evictbench.cache.rows import RowBudget
from evictbench.cache.softmax import Softmax
from evictbench.errors import UserError
from evictbench.policy.ragged import HeadBudgetPolicy
from evictbench.policy.step import NewEntries, SlotTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HeadBudgetCache(PagedCache):
    """The cache of a `HeadBudgetPolicy`; arguments and errors as of `KVCache`.

    A prompt is held as `prefill` says and is cut to the budget at its end. A decode query that sees more than its
    budget, mean over heads, is a RuntimeError.
    """

    policy: HeadBudgetPolicy

    def __init__(self, model: PreTrainedModel, policy: HeadBudgetPolicy, *budget: Any, **settings: Any) -> None:
        super().__init__(model, policy, *budget, **settings)
        if policy.charge(self.shape).per_entry:
            raise UserError(
                f"{policy.name} holds {2 * self.shape.head_dim} numbers or more with each entry, as much as the entry "
                "itself, which a cache with head budgets does not charge."
            )

    def reset(self) -> None:
        """Forget every sequence and free every page."""
        super().reset()
        self.slot_tensors = self.policy.slot_state(self.shape)
        self._new: list[NewEntries] = []
        self._slots: dict[int, Tensor] = {}
        self._bias: dict[int, Tensor] = {}
        self._appended: dict[torch.device, tuple[StackedPools, Tensor]] = {}

    def new_pool(self, rows: int, like: Tensor) -> PagePool:
        """An empty pool for so many rows, with each owner's capacity and centroids. like: a tensor of keys."""
        owners = rows * self.shape.kv_heads
        wide = torch.promote_types(like.dtype, torch.float32)
        most = self.policy.centroids(2**31)
        owner_tensors = {
            "capacity": torch.zeros(owners, dtype=torch.int64),
            "centroids": torch.zeros(owners, dtype=torch.int64),
            "counts": torch.zeros((owners, most), dtype=wide),
        }
        if wide != like.dtype:
            size = (owners, most, like.shape[-1])
            owner_tensors |= {name: torch.zeros(size, dtype=wide) for name in RESIDUALS.values()}
        slot_tensors = {**self.slot_tensors, "bias": SlotTensor(wide, fill=-torch.inf)}
        return PagePool(owners, like, self.bytes, slot_tensors, owner_tensors)

    def held_entries(self, layer: int, row: int) -> list[tuple[Tensor, Tensor]]:
        """Positions and expiry of a row's entries, by KV head, without centroids and the entry to be replaced next."""
        if (prompt := self.evicting[layer].prompts.get(row)) is not None:
            return list(zip(prompt.held("positions"), prompt.held("expiry"), strict=True))
        pool = self.evicting[layer].pool
        assert pool is not None
        heads: list[tuple[Tensor, Tensor]] = []
        for owner in self.owners(row):
            positions, expiry = pool.entries(owner, "positions"), pool.entries(owner, "expiry")
            held = (positions >= 0) & (pool.slots_of(owner) != pool.freed_slot[owner])
            heads.append((positions[held], expiry[held]))
        return heads

    def entries_held(self) -> tuple[Tensor | float, Tensor | float]:
        """The most and the mean entries of a KV head: while prompts are read those held, later those seen next."""
        plain = [prompt.length for layer in self.evicting for prompt in layer.prompts.values()]
        return (max(plain), sum(plain) / len(plain)) if plain else super().entries_held()

    def decodes_in_pages(self, plan: ForwardPlan) -> bool:
        """Whether the pass decodes one token in each row, whose prompt is over."""
        return plan.single and plan.decodes

    def begin_prompt(self, plan: ForwardPlan) -> None:
        """Settle each row's budget, which holds from its first token on: the padding before it shows only then."""
        assert self.budget is not None
        for row in self.rows:
            self.policy.check_entries(self.budget.at(row.prompt, row.prompt), self.shape)
            row.budget = RowBudget.of(self.policy, self.budget, self.mode, row.prompt)
        for row, count in zip(self.rows, plan.counts, strict=True):
            if row.budget is not None and row.budget.divided and 0 < count < row.prompt:
                raise UserError(
                    f"{self.policy.name} divides a layer's budget among its heads before the layer attends to the "
                    f"prompt, which takes the prompt's {row.prompt} tokens in one forward pass, and not {count} of "
                    "them. Give the prompt whole, or take prefill='bounded' or 'dense'."
                )

    def open_decode(self, plan: ForwardPlan, keys: Tensor) -> None:
        """Check the guard, and find the slots of all layers' new entries."""
        for budget, row, (_, mean) in zip(self._budgets(), self.rows, self._visible, strict=True):
            if mean > budget.allowed(row.seen) + 1e-6:
                raise RuntimeError(
                    f"{self.policy.name} let a query see {mean:.2f} entries a head, where the budget is "
                    f"{budget.allowed(row.seen)}."
                )
        for device, pools in self.pools().items():
            stack = self.stack(pools.values())
            positions = plan.decode_positions(self.shape.kv_heads, device)
            slots, numbers = stack.append(positions)
            self._slots.update(zip(pools, slots.unbind(), strict=True))
            if device.type != "cuda":
                bias = stack.bias(positions, self.shape.group, stack.slots["bias"].dtype)
                self._bias.update(zip(pools, bias, strict=True))
            self._appended[device] = stack, numbers

    def _budgets(self) -> list[RowBudget]:
        return [row.budget for row in self.rows if row.budget is not None]

    # Attention.

    def attend(
        self, layer: PagedLayer, plan: ForwardPlan, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax
    ) -> Tensor:
        """Attend over plain tensors while prompts are read, then in pages. The output is shaped like query."""
        scaling = self.plain_scaling(softmax)
        new = replace(
            self.new_entries(layer.index, plan, keys, values),
            activation=self.take_activation(layer.index, keys.device),
        )
        if self.decodes_in_pages(plan):
            return self._attend_decode(layer, plan, query, new, scaling)
        entries = {"keys": keys, "values": values, **self.policy.features(new)}
        if plan.decodes:
            return self._attend_in_turn(layer, plan, query, entries, scaling)
        return self._read_prompt(layer, plan, query, entries, scaling)

    def _read_prompt(
        self, layer: PagedLayer, plan: ForwardPlan, query: Tensor, entries: Mapping[str, Tensor], scaling: float
    ) -> Tensor:
        """A part of the prompt."""
        output = torch.zeros_like(query)
        positions = plan.query_positions(query.device)
        if plan.ends_prompt:
            layer.pool = self.new_pool(max(self.row_capacity or 0, plan.rows), entries["keys"])
        for index, (count, budget) in enumerate(zip(plan.counts, self._budgets(), strict=True)):
            if count == 0:
                continue
            prompt = layer.prompts.setdefault(index, Prompt(self.bytes))
            new = slice(plan.queries - count, plan.queries)
            own = at_row(entries, index, new)
            own["positions"] = positions[index, new].expand(self.shape.kv_heads, -1)
            output[index, :, new] = read_chunk(
                self.policy,
                layer.index,
                prompt,
                budget,
                query[index, :, new],
                own,
                plan.seen[index] - count,
                scaling,
                plan.ends_prompt,
                self.clock,
            )
        return output

    def _attend_decode(
        self, layer: PagedLayer, plan: ForwardPlan, query: Tensor, new: NewEntries, scaling: float
    ) -> Tensor:
        """One token of every row. Its features, and what leaves, are found at the end of the pass."""
        pool, slots = layer.pool, self._slots[layer.index]
        assert pool is not None
        self._new.append(new)
        for name, entry in (("keys", new.keys), ("values", new.values)):
            pool.buffers[name].flatten(0, 1).index_copy_(0, slots, entry.flatten(0, 2))
        positions = plan.decode_positions(self.shape.kv_heads, query.device)
        self.clock.lap(POLICY, query.device)
        output = attend_decode(pool, query, positions, scaling, self._bias.get(layer.index))
        self.clock.lap(ATTENTION, query.device)
        return output

    def _attend_in_turn(
        self, layer: PagedLayer, plan: ForwardPlan, query: Tensor, entries: Mapping[str, Tensor], scaling: float
    ) -> Tensor:
        """Several tokens after the prompt, one after the other, so that each sees what it would see alone."""
        pool = layer.pool
        assert pool is not None
        output, heads = torch.zeros_like(query), self.shape.kv_heads
        stack = self.stack([pool])
        positions = plan.query_positions(query.device)
        for at in range(plan.queries):
            rows = [row for row, count in enumerate(plan.counts) if at >= plan.queries - count]
            if not rows:
                continue
            owners = self.owners_of(rows, query.device)
            wanting, _ = stack.wants_page(plan.rows * heads)
            pool.take(dict.fromkeys(owners[wanting[0, owners] > 0].tolist(), 1))
            by_owner = positions[:, at].repeat_interleave(heads)
            (slots,), _ = stack.append(by_owner[owners], owners)
            for name, entry in entries.items():
                pool.buffers[name].flatten(0, 1).index_copy_(0, slots, entry[:, :, at].flatten(0, 1)[owners])
            attended = attend_decode(pool, query[:, :, at : at + 1].contiguous(), by_owner, scaling)
            output[rows, :, at] = attended[rows, :, 0]
            following = [seen - plan.queries + at + 1 for seen in plan.seen]
            self._evict([pool], following, None if len(rows) == plan.rows else owners)
        return output

    # After a pass.

    def close(self, plan: ForwardPlan) -> None:
        """After the last layer: what leaves, and at the prompt's end the cut."""
        self._evict_after(plan)
        super().close(plan)

    def _evict_after(self, plan: ForwardPlan) -> None:
        if not plan.decodes:
            if not plan.ends_prompt:
                self._drop_hidden(plan, plan.seen)
                return
            self._drop_hidden(plan, [seen - 1 for seen in plan.seen])
            for layer in self.evicting:
                owners = [self.owners(row) for row in range(plan.rows)]
                move_into_pages(self.policy, layer, owners, self._budgets(), tuple(self.slot_tensors))
        elif plan.single:
            self._write_features()
        else:
            return
        had_tokens = [row for row, seen in enumerate(plan.seen) if seen]
        for device, pools in self.pools().items():
            some = None if len(had_tokens) == plan.rows else self.owners_of(had_tokens, device)
            self._evict(list(pools.values()), plan.seen, some)

    def _write_features(self) -> None:
        """Write the features of the tokens that decode has just written, all layers of a device at once."""
        by_device: dict[torch.device, list[NewEntries]] = {}
        for new in self._new:
            by_device.setdefault(new.positions.device, []).append(new)
        self._new = []
        for device, entries in by_device.items():
            stack, numbers = self._appended[device]
            for name, features in self.policy.features_of_layers(entries).items():
                stack.slots[name].flatten(0, 1).index_copy_(0, numbers, features.flatten(0, 3))

    def _evict(self, pools: list[PagePool], following: Sequence[int], owners: Tensor | None) -> None:
        """Find what leaves before the rows' next queries, at the positions `following`. owners: as of `evict_worst`."""
        device, heads, rows = pools[0].device, self.shape.kv_heads, len(following)
        grown = [
            budget.allowed(query) - budget.entries for budget, query in zip(self._budgets(), following, strict=True)
        ]
        by_row = torch.tensor([list(following), grown]).repeat_interleave(heads, dim=1)
        both = torch.zeros((2, pools[0].length.shape[0]), dtype=torch.int64)
        both[:, : rows * heads] = by_row
        both = both.to(device)
        evict_worst(
            self.policy,
            self.stack(pools),
            both[0].to(torch.int32),
            both[1],
            window=int(self.policy.recent(0)),
            states=tuple(self.slot_tensors),
            owners=owners,
            rows=rows * heads,
        )

    def _drop_hidden(self, plan: ForwardPlan, following: Iterable[int]) -> None:
        """Let bounded prompts drop what the queries at these positions do not see."""
        for index, (query, count, budget) in enumerate(zip(following, plan.counts, self._budgets(), strict=True)):
            dropped = budget.dropped(query) - budget.dropped(plan.seen[index] - count) if count else 0
            if dropped <= 0:
                continue
            by_device: dict[torch.device, list[Prompt]] = {}
            for layer in self.evicting:
                prompt = layer.prompts[index]
                by_device.setdefault(prompt.buffers["keys"].device, []).append(prompt)
            for prompts in by_device.values():
                drop_hidden(self.policy, prompts, dropped, query, budget.centroids)
