"""Policies whose KV heads keep different numbers of entries. Their caches lie in pages.

`RaggedPolicy` says of each entry until when it is seen (DMS). `HeadBudgetPolicy` gives each head a pool of fixed size
at the end of the prompt, in which entries compete (IndexMem++).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from evictbench.policy.base import BasePolicy
from evictbench.policy.declarations import RENAMED

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy.budget import Budget
    from evictbench.policy.declarations import Prefill
    from evictbench.policy.step import Activation, HeadBudgets, NewEntries, PrefillChunk


PAGED_RENAMED: Mapping[str, str] = {
    **RENAMED,
    "decides_late": "what every RaggedPolicy does",
    "read_together": "read_layers",
    "expiry_together": "expiry_of_layers",
    "judge": "features",
    "judge_together": "features_of_layers",
    "worth": "score_at",
    "leaving": "evicted_in_chunk",
    "divide": "head_budgets",
    "summaries": "centroids",
    "summarise": "cluster",
    "joins": "nearest_centroid",
}
"""`RENAMED` for policies in pages."""


class PagedPolicy(BasePolicy, family=True):
    """What both families have in common. Subclass `RaggedPolicy` or `HeadBudgetPolicy` instead.

    stated_length: the number of tokens that a budget is meant for, where the suite states it; None: each prompt's own.
    chunk_dependent: decisions depend on how a prompt is cut into chunks, even where nothing is bounded.

    A method that ends in `_layers` or `_of_layers` serves one decode token of each row in several layers of one device.
    Its default calls the method for one layer; a class that redefines the latter gets the default back.
    """

    stated_length: int | None = None
    chunk_dependent: bool = False
    renamed = PAGED_RENAMED
    batched: ClassVar[Mapping[str, str]] = {}
    """The name of a method for one layer to the name of its counterpart for several layers."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        family = next(base for base in cls.__mro__ if "batched" in vars(base))
        for one, several in cls.batched.items():
            if one in vars(cls) and several not in vars(cls):
                setattr(cls, several, vars(family)[several])

    def fit(self, config: Any) -> None:
        """Read from a model's config what the settings leave open."""

    @property
    def hooks(self) -> frozenset[Activation]:
        """The activations that the policy reads in each layer, besides keys and values."""
        return frozenset()

    def read(self, layer: int, name: Activation, tensor: Tensor) -> Tensor:
        """Return the tensor to remember until the layer attends. name, tensor: an activation of `hooks`."""
        raise NotImplementedError(f"{type(self).__name__} reads no activations")

    def before_rotation(self, queries: Tensor) -> Tensor | None:
        """The queries `[rows, queries, heads, head_dim]` with which the model goes on; None: unchanged."""
        return None

    def after_rotation(self, queries: Tensor) -> Tensor:
        """The queries `[rows, heads, queries, head_dim]` that attend."""
        return queries


class RaggedPolicy(PagedPolicy, family=True):
    """A method that decides for each entry of each head until when it is seen.

    In a pass with one token a row, decisions matter to the next pass only, so that the engine asks for all layers at
    once after the last one has attended.
    """

    batched = MappingProxyType({"read": "read_layers", "expiry": "expiry_of_layers"})

    def allot(self, share: float, length: int) -> float:
        """The policy's own number (a threshold, say) for a budget that is this share of a text of `length` tokens.

        Raises UserError for a share that the policy cannot reach.
        """
        return share

    def threshold(self, budget: Budget | None, prompt: int) -> float:
        """The threshold that `allot` returns for a budget. prompt: its tokens. A budget of None is the whole text.

        A share is one of the length that the suite states (`stated_length`), or of the prompt if that is longer; a
        number of entries is divided by that length. Raises UserError for a budget that the policy cannot reach.
        """
        length = max(prompt, self.stated_length or 0)
        if budget is None:
            share = 1.0
        elif budget.tokens is None:
            share = budget.share or 1.0
        else:
            share = min(1.0, budget.tokens / length)
        return self.allot(share, length)

    def read_layers(self, layers: Sequence[int], name: Activation, tensors: Sequence[Tensor]) -> Tensor:
        """`read` for several layers, `[layers, ...]`."""
        import torch

        return torch.stack([self.read(layer, name, tensor) for layer, tensor in zip(layers, tensors, strict=True)])

    @classmethod
    def undefined_methods(cls) -> list[str]:
        """`expiry`, if it is not defined."""
        return ["expiry"] if cls.expiry is RaggedPolicy.expiry else []

    def expiry(self, entries: NewEntries) -> Tensor:
        """The first query position that may no longer see an entry, NEVER if there is none.

        `[rows, kv_heads, 1 + new]`. Item 0 is the expiry of the last entry before this pass, which the policy may
        decide now. The others are those of the new entries; the next query sees the last of them.
        """
        raise NotImplementedError(f"{type(self).__name__} decides nothing")

    def expiry_of_layers(self, entries: Sequence[NewEntries]) -> Tensor:
        """`expiry` for several layers, `[layers, rows, kv_heads, 2]`."""
        import torch

        return torch.stack([self.expiry(one_layer) for one_layer in entries])


class HeadBudgetPolicy(PagedPolicy, family=True):
    """A method whose entries compete in a pool of each head.

    A head holds sinks, the last `recent(budget)` positions and a pool. When a token leaves the recent window it joins
    the pool; if the pool is then too large, the entry with the lowest score for the next query is evicted for good.
    `slot_state` travels with the entries. A layer's budget is divided among its heads for each prompt.

    divides_first: natively, before the layer attends to the prompt, whose queries the pools of these sizes then limit.
    The prompt has to come in one forward pass for that. Else, and in the other prompt modes, at the end of the prompt.
    """

    batched = MappingProxyType({"features": "features_of_layers"})
    divides_first: bool = False

    @classmethod
    def undefined_methods(cls) -> list[str]:
        """Those of `features`, `score_at` and `evicted_in_chunk` that are not defined."""
        needed = ("features", "score_at", "evicted_in_chunk")
        return [name for name in needed if getattr(cls, name) is getattr(HeadBudgetPolicy, name)]

    def reads_whole(self, given: Prefill) -> bool:
        """As of `BasePolicy`: where budgets are divided before a layer attends, which they are natively."""
        return self.divides_first and self.prefill_mode(given) == "sparse"

    def features(self, entries: NewEntries) -> Mapping[str, Tensor]:
        """The slot tensors of new entries, `[rows, kv_heads, new(, width)]` by name."""
        raise NotImplementedError(f"{type(self).__name__} has no features")

    def features_of_layers(self, entries: Sequence[NewEntries]) -> Mapping[str, Tensor]:
        """`features` for several layers, `[layers, rows, kv_heads, 1(, width)]` by name."""
        import torch

        features = [self.features(one_layer) for one_layer in entries]
        return {name: torch.stack([one_layer[name] for one_layer in features]) for name in features[0]}

    def score_at(self, state: Mapping[str, Tensor], age: Tensor) -> Tensor:
        """The score of entries for a query that stands `age` positions after them, floating and shaped like `age`.

        state: the slot tensors. The lowest score is evicted; of equal scores the later position.
        """
        raise NotImplementedError(f"{type(self).__name__} has no score")

    def evicted_in_chunk(self, chunk: PrefillChunk) -> Tensor:
        """The first query position that may not see each entry, NEVER if it comes after the query behind the chunk.

        `[kv_heads, slots]` int32. One entry of a head's pool leaves for each entry that is too many.
        """
        raise NotImplementedError(f"{type(self).__name__} has no score")

    def ranking_query(self, prompt: int) -> int:
        """The position of the query whose scores rank entries when budgets are divided. prompt: its tokens."""
        return prompt - 1

    def head_budgets(self, budgets: HeadBudgets) -> Tensor:
        """The entries of each head beside the protected ones, `[kv_heads]` int64, `places` on average.

        Centroids are among them, and a head has no fewer. They bound the pool by themselves until the prompt's end,
        and from there on with the centroids in them.
        """
        import torch

        return torch.full(budgets.mass.shape[:1], budgets.places)

    def centroids(self, budget: int) -> int:
        """How many entries of each head, at most, are means of evicted entries. They are part of the budget."""
        return 0

    def cluster(self, keys: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """At most `count` means of entries `[entries, head_dim]`: keys and values `[means, head_dim]`, float32 or
        wider, and the number of entries that each stands for, `[means]`."""
        raise NotImplementedError(f"{type(self).__name__} has no centroids")

    def nearest_centroid(self, keys: Tensor, counts: Tensor, capacity: Tensor, evicted: Tensor) -> Tensor:
        """The index of the mean that an evicted entry joins, `[...]` int64.

        keys: `[..., means, head_dim]`. counts: `[..., means]`, 0 where there is no mean yet. capacity: `[...]`, how
        many means there may be. evicted: the entry's key, `[..., head_dim]`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no centroids")
