"""What the engine shows a policy: a model's sizes, state that it may hold, and one layer in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from evictbench.policy.layer_kinds import layer_kinds

if TYPE_CHECKING:
    import torch
    from torch import Tensor


GroupReduction = Literal["mean", "max", "sum"]

Activation = Literal["residual", "normed_hidden", "pre_rope_queries"]
"""A tensor inside a decoder layer that a policy may read. residual: the layer's input before any norm, `[rows, queries,
hidden_size]`. normed_hidden: the input of its attention, `[rows, queries, hidden_size]`. pre_rope_queries: its queries
before their rotation, and after their norm where there is one, `[rows, queries, heads, head_dim]`."""

ACTIVATIONS: frozenset[Activation] = frozenset(get_args(Activation))

Watch = Callable[[int, "Tensor", "Tensor", "Tensor", float], None]
"""A function that a dense run calls for every layer with the layer's index, the rotated query `[1, heads, tokens,
head_dim]`, the rotated key and the value `[1, kv_heads, tokens, head_dim]`, and the scaling of query times key."""

DenseRun = Callable[[Watch], None]
"""A dense run over one text: calls a `Watch` for every layer, the first layer first."""

EMPTY = -1
"""The position of a slot that holds no entry."""

NEVER = 2**31 - 1
"""The expiry of an entry that every later query may see. An expiry is the first query position that may no longer see
an entry, int32."""

GROUP_DIM = 2
"""The dimension of a signal that runs over the query heads of one KV head."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that a policy may depend on: those of the layers that evict.

    layers: how many layers evict; a policy sees no others, and counts them from 0. heads, kv_heads, head_dim: query
    heads, KV heads and the width of a key of each. hidden_size: width of the hidden states, 0 where not stated.
    value_dim: the width of a value, head_dim where it is 0. numbers: the number of each of the layers in the model,
    where the model has others besides; without, they are all of its layers.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int = 0
    value_dim: int = 0
    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Read from a transformers config."""
        text = config.get_text_config(decoder=True)
        kinds = layer_kinds(config)
        numbers = tuple(number for number, kind in enumerate(kinds) if kind.evicts)
        if numbers and getattr(text, "is_heterogeneous", False):
            text = text.per_layer_config[numbers[0]]
        heads = int(text.num_attention_heads)
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        if getattr(text, "multi_query", False):  # GPTBigCode, whatever the number that stands beside it
            kv_heads = 1
        if getattr(text, "kv_lora_rank", None):  # the cache holds a key and a value of each query head
            kv_heads = heads
        head_dim = getattr(text, "qk_head_dim", None) or getattr(text, "head_dim", None) or text.hidden_size // heads
        value_dim = getattr(text, "v_head_dim", None) or head_dim
        return cls(
            layers=len(numbers),
            heads=heads,
            kv_heads=int(kv_heads),
            head_dim=int(head_dim),
            hidden_size=int(getattr(text, "hidden_size", None) or 0),
            value_dim=int(value_dim) if value_dim != head_dim else 0,
            numbers=numbers if len(numbers) < len(kinds) else (),
        )

    @property
    def entry_numbers(self) -> int:
        """The numbers of one entry: its key and its value in one KV head."""
        return self.head_dim + (self.value_dim or self.head_dim)

    def number(self, layer: int) -> int:
        """The number in the model of an evicting layer."""
        return self.numbers[layer] if self.numbers else layer

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
class NewEntries:
    """The new entries of one layer in one forward pass, before they are evicted or written over.

    layer: the layer's index. shape: the model's sizes. positions: `[rows, new]` int32, -1 for padding, which comes
    before a row's tokens. keys, values: `[rows, kv_heads, new, head_dim]`, as cached (rotated).
    unrotate_angles: only for a policy that `needs_rope`. Called with a distance n it returns cosines and sines
    `[rows, 1, new, rotary_dim / 2]`; `evictbench.cache.rope.rotate_by_angles` undoes with them the rotation of the
    keys that stand n positions before the new ones. Called with several distances it returns the angles of each, one
    behind the other in dimension 2.
    labels: only for a policy that `needs_labels`. `[rows, kv_heads, new]` float32, the label of each entry, NaN where
    a sequence has no label.
    threshold: only for a `RaggedPolicy`. `[rows]`, what its `allot` returned for each row's budget.
    activation: only for a policy with `hooks`. What its `read` returned in this pass for this layer.
    """

    layer: int
    shape: ModelShape
    positions: Tensor
    keys: Tensor
    values: Tensor
    unrotate_angles: Callable[..., tuple[Tensor, Tensor]] | None = None
    labels: Tensor | None = None
    threshold: Tensor | None = None
    activation: Tensor | None = None


@dataclass(frozen=True)
class PrefillChunk:
    """The entries that one layer stores of one row while its prompt is read, for a `HeadBudgetPolicy`.

    state: the policy's slot tensors, `[kv_heads, slots(, width)]`. positions: `[kv_heads, slots]` int32, ascending; the
    last `new` of them belong to this chunk, which begins at position `first`. capacity: entries of each head's pool,
    one number for all heads; or `[kv_heads]` int64 where the pools have been divided before this layer attends
    (`divides_first`): then the chunk is the whole prompt.
    """

    state: Mapping[str, Tensor]
    positions: Tensor
    first: int
    new: int
    capacity: int | Tensor


@dataclass(frozen=True)
class HeadBudgets:
    """What is known when one layer's budget is divided among its KV heads, before or after it attends to a prompt.

    layer: the layer's index. mass: `[kv_heads, slots]`, the softmax of the prompt's last query over all stored
    entries, mean over the query heads of a KV head. scores: `[kv_heads, slots]`, the score of each entry for the
    query `ranking_query`. competes: `[kv_heads, slots]` bool, the entries that are not protected. places: entries of
    each head beside the protected ones if all heads had equally many. centroids: how many of each head's places are
    centroids after the prompt. over_budget: the prompt is longer than its budget, and all of it is stored.
    """

    layer: int
    mass: Tensor
    scores: Tensor
    competes: Tensor
    places: int
    centroids: int
    over_budget: bool


class Signals:
    """The signals that the policy declared, for the forward pass that has just attended. All are float32 or wider.

    A declared signal that this pass does not have is None. Reading one that is not declared is an AttributeError.

    last_query_probs: `[rows, kv_heads, group, slots]`, the softmax row of each sequence's last query.
    mass: `[rows, kv_heads, group, slots]`, the column sums of the causal softmax over this pass's queries.
    window_probs: a function without arguments that returns `[rows, kv_heads, group, window, slots]`, the softmax rows
    of each sequence's last `window` queries (those of earlier passes included) over the entries that are held now. A
    query that does not exist yet has a row of zeros.
    recent_probs: a function of n that returns `[rows, kv_heads, group, n, slots]`, the softmax rows of the last n
    queries of this pass, each over the entries that it saw. With a second argument m it returns those of the n queries
    before the last m, so that a caller can go through many queries part by part. Padding, and queries that this pass
    does not have, have rows of zeros. Sinks count at the positions where they were cached.
    """

    last_query_probs: Tensor | None
    mass: Tensor | None
    window_probs: Callable[[], Tensor] | None
    recent_probs: Callable[..., Tensor] | None

    def __init__(self, declared: Iterable[str] = ()) -> None:
        vars(self).update(dict.fromkeys(declared))

    def __getattr__(self, name: str) -> Any:
        if name in Signals.__annotations__:
            raise AttributeError(f"the signal {name} is read and not declared in `signals`")
        raise AttributeError(f"there is no signal {name}: there are {', '.join(sorted(Signals.__annotations__))}")


@dataclass
class Step:
    """One layer after one forward pass, as a policy sees it. `slots` is the number of slots in use.

    layer: the layer's index. shape: the model's sizes.
    positions: `[rows, sets, slots]` int32, each entry's position in its sequence, -1 where a slot is empty. `sets` is
    kv_heads, or 1 where the heads share one kept set.
    keys, values: `[rows, kv_heads, slots, head_dim]`, to be read only.
    state: the policy's slot tensors `[rows, kv_heads, slots(, width)]`, views to read and to update in place.
    memory: the policy's sequence tensors `[rows, kv_heads, *size]`, views to read and to update in place.
    entered: the new entries of this pass.
    place: `place(name, value)` writes the new entries' part of a slot tensor, `[rows, kv_heads, new]`, or of a shared
    tensor, `[rows, sets, new]`.
    query_positions: `[rows, queries]` int32, -1 for padding.
    budgets: `[rows, queries + 1]` int64, how many entries each query of this pass may see, and then the next query
    (without the state that the policy charges). steady: all of a row's budgets are equal.
    budget: the one number that all rows' budgets are, known on the host; None where they differ.
    shared: the policy's shared tensors `[rows, sets, slots(, width)]` or `[rows, sets, *size]`, views to read and to
    update in place. With granularity "model" they belong to the whole model and lie on the first layer's device.
    carried: a dictionary that the policy may fill in one layer and read in the next. It is empty at the first layer of
    each pass and is not counted in bytes.
    dense: this pass reads a part of a prompt that is held whole. ends_prompt: it reads the last part. cuts: entries
    are evicted after this pass.
    """

    layer: int
    shape: ModelShape
    positions: Tensor
    keys: Tensor
    values: Tensor
    state: Mapping[str, Tensor]
    memory: Mapping[str, Tensor]
    entered: NewEntries
    place: Callable[[str, Tensor], None]
    query_positions: Tensor
    budgets: Tensor
    steady: bool
    budget: int | None = None
    signals: Signals = field(default_factory=Signals)
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)
    dense: bool = False
    ends_prompt: bool = False
    cuts: bool = False

    def __post_init__(self) -> None:
        one_token = self.query_positions.shape[1] == 1
        self.kind = (self.layer, one_token, self.dense, self.ends_prompt, self.cuts)
        """What tells this pass and layer from others, for checks that are made once for each kind."""
        shown = (self.keys, self.values, self.positions)
        self.read_only = tuple(tensor for tensor in shown if not tensor.is_inference())
        """Those of keys, values and positions whose writes torch counts: the cache's own, and not copies."""


def reduce_group(probs: Tensor, how: GroupReduction) -> Tensor:
    """Reduce the query heads of one KV head: `[rows, kv_heads, group, ...]` to `[rows, kv_heads, ...]`."""
    if how == "max":
        return probs.amax(GROUP_DIM)
    total = probs.sum(GROUP_DIM)
    return total / probs.shape[GROUP_DIM] if how == "mean" else total
