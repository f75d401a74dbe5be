"""What the engine shows a policy: a model's sizes, state that it may hold, and one layer in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor


GroupReduction = Literal["mean", "max", "sum"]

GROUP_DIM = 2
"""The dimension of a signal that runs over the query heads of one KV head."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that a policy may depend on. hidden_size: width of the hidden states, 0 where not stated."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int = 0

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Read from a transformers config."""
        text = config.get_text_config(decoder=True)
        heads = int(text.num_attention_heads)
        return cls(
            layers=int(text.num_hidden_layers),
            heads=heads,
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            hidden_size=int(getattr(text, "hidden_size", None) or 0),
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class SlotTensor:
    """A tensor that travels with the entries: `[rows, kv_heads, slots]`, or `[.., slots, width]` where width > 0.

    while_dense: held only as long as a prompt is held whole, and freed at its end (`slot_state` only).
    """

    dtype: torch.dtype
    width: int = 0
    fill: float = 0.0
    while_dense: bool = False


@dataclass(frozen=True)
class MemoryTensor:
    """State of a whole sequence, which does not travel with entries: `[rows, kv_heads, *size]` in one layer, or
    `[rows, sets, *size]` beside one placement."""

    dtype: torch.dtype
    size: tuple[int, ...]
    fill: float = 0.0


@dataclass(frozen=True)
class Entering:
    """The new entries of one layer in one forward pass, before they are written.

    positions: `[rows, new]` int32, -1 for padding. keys, values: `[rows, kv_heads, new, head_dim]`, as cached.
    turning_back: where the policy is `rotary`, call it with n for the angles (cosines, sines, `[rows, 1, new, ..]`)
    that undo, by `evictbench.cache.rope.turn`, the rotation of the keys n positions before the new ones; with several n
    for several sets of angles, one behind the other. known: `[rows, kv_heads, new]`,
    the label of each entry where the policy `foresees`; NaN where a sequence's labels end.
    """

    layer: int
    shape: ModelShape
    positions: Tensor
    keys: Tensor
    values: Tensor
    turning_back: Callable[..., tuple[Tensor, Tensor]] | None = None
    known: Tensor | None = None


@dataclass(frozen=True)
class Arriving:
    """The new entries of one layer in one forward pass, as a policy sees them that is `ragged`.

    positions: `[rows, new]` int32, -1 for padding, which comes before a row's tokens. allotted: `[rows]`, what
    `Policy.allot` made of each row's budget. read: what `Policy.read` made of this pass, if it reads anything.
    """

    layer: int
    shape: ModelShape
    positions: Tensor
    allotted: Tensor
    read: Tensor | None = None


@dataclass(frozen=True)
class Rivals:
    """What one layer holds of one row while its prompt is read, as a policy sees it whose entries are `contested`.

    state: its slot tensors, `[kv_heads, slots(, width)]`. positions: `[kv_heads, slots]` int32, ascending; the last
    `new` are those of this pass, which begin at position `first`. places: of each head's pool.
    """

    state: Mapping[str, Tensor]
    positions: Tensor
    first: int
    new: int
    places: int


@dataclass(frozen=True)
class Division:
    """What is known where one layer's pool is divided among its heads, at the end of a row's prompt.

    mass: `[kv_heads, slots]`, the softmax of the last query over all that is stored, mean over a head's group;
    worth: likewise, of the entries to that query; competes: likewise, bool, those that are not kept anyway.
    places: of an equal share. crowded: the prompt is more than its budget, and all of it is stored.
    """

    layer: int
    mass: Tensor
    worth: Tensor
    competes: Tensor
    places: int
    crowded: bool


@dataclass
class Signals:
    """What the policy declared, for the forward pass that has just attended. Float32.

    last_query_probs: `[rows, kv_heads, group, slots]`, the softmax row of each sequence's last query.
    mass: `[rows, kv_heads, group, slots]`, column sums of the causal softmax over this pass's queries.
    window_probs: call it for `[rows, kv_heads, group, window, slots]`, the softmax rows of the last `window`
    queries of each sequence (earlier passes included) over the entries held now; zero for queries not yet seen.
    recent_probs: call it with n for `[rows, kv_heads, group, n, slots]`, the softmax rows of the last n queries of this
    pass, each over what it saw; with (n, before), of the n queries in front of the last `before`, so that many need not
    be held at once. Zero for padding, and where the pass has fewer queries. Sinks lie where they were cached.
    """

    last_query_probs: Tensor | None = None
    mass: Tensor | None = None
    window_probs: Callable[[], Tensor] | None = None
    recent_probs: Callable[..., Tensor] | None = None


@dataclass
class Step:
    """One layer after one forward pass, as a policy sees it. `slots` counts the slots in use.

    positions: `[rows, sets, slots]` int32, the position of each entry in its sequence, -1 where a slot is empty;
    `sets` is kv_heads, or 1 where the kept set is shared.
    state: the policy's slot tensors, views `[rows, kv_heads, slots, ...]` to read and to update in place.
    memory: the policy's sequence tensors, views `[rows, kv_heads, ...]`, likewise. entered: this pass's entries.
    place: write a slot tensor of those, `place(name, [rows, kv_heads, new])`, or a shared one, `[rows, sets, new]`.
    query_positions: `[rows, queries]` int32, -1 for padding.
    budgets: `[rows, queries + 1]` int64, the entries that each query of this pass may see, and the next query after
    them (state that the policy charges already taken off); steady: they are all the same for a row.
    shared: the policy's shared tensors, views `[rows, sets, slots, ...]` to read and to update in place; where `shares`
    is "model" those of the whole model, on the first layer's device. carried: what the policy hands on from layer to
    layer within this pass, empty at the first; it is not counted in bytes.
    dense: the prompt is held whole, and this pass is a part of it; ends_prompt: its last. cuts: something is evicted
    after this pass.
    """

    layer: int
    shape: ModelShape
    positions: Tensor
    keys: Tensor
    values: Tensor
    state: Mapping[str, Tensor]
    memory: Mapping[str, Tensor]
    entered: Entering
    place: Callable[[str, Tensor], None]
    query_positions: Tensor
    budgets: Tensor
    steady: bool
    signals: Signals = field(default_factory=Signals)
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)
    dense: bool = False
    ends_prompt: bool = False
    cuts: bool = False


def reduce_group(probs: Tensor, how: GroupReduction) -> Tensor:
    """Reduce the query heads of one KV head: `[rows, kv_heads, group, ...]` to `[rows, kv_heads, ...]`."""
    if how == "max":
        return probs.amax(GROUP_DIM)
    total = probs.sum(GROUP_DIM)
    return total / probs.shape[GROUP_DIM] if how == "mean" else total


Watch = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""Hears of every layer: its number, query `[1, heads, tokens, head_dim]` and key `[1, kv_heads, tokens, head_dim]`,
both rotated, the value, and the scaling of query times key."""

DenseRun = Callable[[Watch], None]
"""A dense run over one text: shows every layer, the first one first."""

Tap = Literal["residual", "normed_hidden", "pre_rope_queries"]
"""residual: a decoder layer's input, before any norm, `[rows, queries, hidden]`. normed_hidden: what its attention
receives, `[rows, queries, hidden]`. pre_rope_queries: its queries after their norm where there is one and before
their rotation, `[rows, queries, heads, head_dim]`."""

TAPS: frozenset[Tap] = frozenset(get_args(Tap))
