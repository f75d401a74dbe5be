"""PagedCache: what both caches in pages have in common. Their heads hold different numbers of entries.

A `RaggedPolicy` lives in an `ExpiryCache`, a `HeadBudgetPolicy` in a `HeadBudgetCache`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evictbench.cache.attention import Unsupported
from evictbench.cache.base import KVCache
from evictbench.cache.forward_plan import ForwardPlan
from evictbench.cache.paged.layer import PagedLayer
from evictbench.cache.paged.pool import PagePool
from evictbench.cache.paged.stack import StackedPools
from evictbench.cache.rows import Sequence
from evictbench.cache.softmax import Softmax
from evictbench.policy.ragged import PagedPolicy
from evictbench.policy.step import EMPTY, Activation, NewEntries

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.policy.budget import Budget


class PagedCache(KVCache):
    """A KV cache in pages; arguments and errors as of `KVCache`.

    Occupancy is measured: for each decode query the most that one of its heads sees, and the mean over its heads. The
    bytes held are at most 1.15 times those of the kept keys and values where heads keep 150 entries or more on average.
    """

    evicting: list[PagedLayer]
    policy: PagedPolicy

    def __init__(
        self, model: PreTrainedModel, policy: PagedPolicy, budget: Budget | int | str | None = None, **settings: Any
    ) -> None:
        policy.fit(model.config)
        super().__init__(model, policy, budget, **settings)
        self.listen(policy.hooks)

    def new_layer(self, index: int) -> PagedLayer:
        """A layer without entries."""
        return PagedLayer(self, index)

    @abstractmethod
    def new_pool(self, rows: int, like: Tensor) -> PagePool:
        """An empty pool with owners for so many rows. like: keys."""

    def reset(self) -> None:
        """Forget every sequence and free every page."""
        super().reset()
        self._stacks: list[StackedPools] = []
        self._activations: dict[int, Tensor] = {}
        self._visible: list[tuple[int, float]] = []

    # What is held.

    def owners(self, row: int) -> range:
        """The numbers of a row's KV heads in every pool."""
        return range(row * self.shape.kv_heads, (row + 1) * self.shape.kv_heads)

    def owners_of(self, rows: Iterable[int], device: torch.device) -> Tensor:
        """The numbers of several rows' KV heads, int64."""
        owners = [owner for row in rows for owner in self.owners(row)]
        return torch.tensor(owners, dtype=torch.int64, device=device)

    def pools(self) -> dict[torch.device, dict[int, PagePool]]:
        """The pools of each device, by layer."""
        pools: dict[torch.device, dict[int, PagePool]] = {}
        for layer in self.evicting:
            if layer.pool is not None:
                pools.setdefault(layer.pool.device, {})[layer.index] = layer.pool
        return pools

    def stack(self, pools: Iterable[PagePool]) -> StackedPools:
        """Pools of one device side by side."""
        pools = list(pools)
        for stack in self._stacks:
            if len(stack.pools) == len(pools) and all(map(is_, stack.pools, pools)):
                return stack
        self._stacks.append(StackedPools(pools))
        return self._stacks[-1]

    def kept(self, layer: int, row: int = 0) -> Tensor:
        """The positions that the next query sees, by KV head, ascending: `[kv_heads, most]` int64, padded with -1."""
        following = self.rows[row].seen
        heads = [positions[expiry > following] for positions, expiry in self.held_entries(layer, row)]
        ascending = [positions.long().sort().values for positions in heads]
        return torch.nn.utils.rnn.pad_sequence(ascending, batch_first=True, padding_value=EMPTY)

    @abstractmethod
    def held_entries(self, layer: int, row: int) -> list[tuple[Tensor, Tensor]]:
        """Positions and expiry of the entries that a layer holds of a row, by KV head."""

    def entries_held(self) -> tuple[Tensor | float, Tensor | float]:
        """Entries that the next query sees without its own, the most and the mean over KV heads."""
        owners = len(self.rows) * self.shape.kv_heads
        pools = [layer.pool for layer in self.evicting if layer.pool is not None]
        visible = torch.stack([pool.visible[:owners].to(pools[0].device) for pool in pools])
        return visible.amax(), visible.double().mean()

    def evictable_bytes(self) -> int:
        """Bytes held in the layers that evict: keys, values, positions, expiries, and the owners of pages."""
        return sum(layer.nbytes() for layer in self.evicting)

    def row_bytes(self, row: int) -> int:
        """Bytes of one row's part of what is held, in proportion to its pages in use."""
        return sum(layer.pool.bytes_of(self.owners(row)) for layer in self.evicting if layer.pool is not None)

    # Activations that the policy reads.

    def on_activation(self, layer: int, name: Activation, tensor: Tensor) -> Tensor | None:
        """Let the policy read an activation, and change queries before their rotation."""
        self._activations[layer] = self.read(layer, name, tensor)
        return self.policy.before_rotation(tensor) if name == "pre_rope_queries" else None

    def read(self, layer: int, name: Activation, tensor: Tensor) -> Tensor:
        """Return the tensor to remember of an activation until its layer attends."""
        return self.policy.read(layer, name, tensor)

    def take_activation(self, layer: int, device: torch.device) -> Tensor | None:
        """Return what `read` remembered of this layer in this pass, and forget it; None for a policy without hooks."""
        activation = self._activations.pop(layer, None)
        if activation is None and self.policy.hooks:
            raise RuntimeError(
                f"{self.policy.name} reads {', '.join(self.policy.hooks)}, which this model did not pass on: it has to "
                "be run whole, and with this cache as its argument."
            )
        return None if activation is None else activation.to(device)

    # One forward pass.

    def plan(self, queries: int, counts: list[int], real: Tensor | None, ends_prompt: bool) -> ForwardPlan:
        """Return the plan of the next pass. It limits no query: the pages say which entries a query may see."""
        return ForwardPlan.make(
            self.rows,
            queries,
            counts,
            real,
            allowance=lambda row, seen: seen + 1,
            keep=lambda budget: None,
            changes=False,
            of_cache=False,
            dense=False,
            decodes=self.prompt_done,
            ends_prompt=ends_prompt,
        )

    def plain_scaling(self, softmax: Softmax) -> float:
        """The scaling of a layer's logits. Raises Unsupported where they are capped or have sinks."""
        if not softmax.plain:
            raise Unsupported(f"its logits are capped or have sinks, which {self.policy.name}'s pages do not know")
        return softmax.scaling

    @abstractmethod
    def decodes_in_pages(self, plan: ForwardPlan) -> bool:
        """Every row has one new token in this pass, and its other entries in pages."""

    @abstractmethod
    def begin_prompt(self, plan: ForwardPlan) -> None:
        """Before a pass that reads a part of a prompt: settle what each row's budget comes to."""

    @abstractmethod
    def open_decode(self, plan: ForwardPlan, keys: Tensor) -> None:
        """Before a pass in which each row decodes a token: find the slots of the new entries in all layers."""

    def open(self, plan: ForwardPlan, keys: Tensor) -> None:
        """Before the first layer attends: settle budgets, or see that each new entry has a slot."""
        if not plan.decodes:
            self.begin_prompt(plan)
        self._visible = []
        if self.decodes_in_pages(plan):
            self._visible = self._open_pages(plan.rows)
            self.open_decode(plan, keys)

    def _open_pages(self, rows: int) -> list[tuple[int, float]]:
        """Give a page to each head whose next entry has no slot.

        Returns for each row how many entries its heads will see, the most and the mean over layers and heads. The host
        waits once for a device, and not for each layer.
        """
        visible: list[Tensor] = []
        for pools in (list(by_layer.values()) for by_layer in self.pools().values()):
            for pool in pools:
                pool.trim()
            wanting, seen = self.stack(pools).wants_page(rows * self.shape.kv_heads).cpu()
            wanted: dict[int, dict[int, int]] = {}
            for index, owner in wanting.nonzero().tolist():
                wanted.setdefault(index, {})[owner] = 1
            for index, pages in wanted.items():
                pools[index].take(pages)
            visible.append(seen + 1)
        by_row = torch.cat(visible).view(-1, rows, self.shape.kv_heads).transpose(0, 1).flatten(1)
        return list(zip(by_row.amax(-1).tolist(), by_row.double().mean(-1).tolist(), strict=True))

    def new_entries(self, layer: int, plan: ForwardPlan, keys: Tensor, values: Tensor) -> NewEntries:
        """The new entries of a layer as the policy sees them, without what it has read."""

        def thresholds() -> Tensor:
            return torch.tensor([row.threshold for row in self.rows], device=keys.device)

        return NewEntries(
            layer=layer,
            shape=self.shape,
            positions=plan.query_positions(keys.device),
            keys=keys,
            values=values,
            threshold=plan.once("threshold", keys.device, thresholds),
        )

    def close(self, plan: ForwardPlan) -> None:
        """After the last layer: count what decode queries saw."""
        if plan.decodes:
            for row, (largest, mean) in zip(self.rows, self._visible, strict=False):
                row.occupancy.add(largest, mean)
        super().close(plan)

    # Rows that come and go.

    def admit(self, prompt: PagedCache) -> int:
        """Copy the pages of a one-row cache into the pools of the next free row; returns that row."""
        index = self.next_free_row()
        for source, target in zip(prompt.evicting, self.evicting, strict=True):
            assert source.pool is not None
            if target.pool is None:
                target.pool = self.new_pool(self.row_capacity or 1, source.pool.buffers["keys"])
            target.pool.copy_from(source.pool, self.owners(index).start)
        (row,) = prompt.rows
        self.admit_fixed(prompt, index)
        self.rows.append(Sequence(row.seen, row.held, row.prompt, threshold=row.threshold, budget=row.budget))
        self.columns = max(self.columns, prompt.columns)
        self.prompt_done = True
        return index

    def release(self, row: int) -> None:
        """End the sequence in a row: its pages are freed, and the last row's owners take its place."""
        last = len(self.rows) - 1
        for layer in self.evicting:
            if layer.pool is not None:
                layer.pool.move_owners(self.owners(last).start, self.owners(row).start, self.shape.kv_heads)
        self.release_fixed(row)
        self.rows[row] = self.rows[last]
        self.rows.pop()


def at_row(entries: Mapping[str, Tensor], row: int, new: slice) -> dict[str, Tensor]:
    """One row's new tokens, `[kv_heads, new, ...]`, of tensors `[rows, kv_heads, queries, ...]`."""
    return {name: tensor[row, :, new] for name, tensor in entries.items()}
