"""KVCache: what a cache of slots and a cache of pages have in common, as transformers and the generation loop see it.

In every layer a forward pass writes the new keys and values, attends, shows the policy its signals, and evicts. A cache
says how (`attend`); this module keeps the rows and plans each pass.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import Cache

from evictbench.cache import hooks
from evictbench.cache.attention import OURS, use
from evictbench.cache.buffers import ByteCounter
from evictbench.cache.clock import REST, SIGNALS, Clock, NullClock
from evictbench.cache.fixed import StatefulLayer, WindowLayer, fixed_layer, number_of_states
from evictbench.cache.forward_plan import ForwardPlan, real_tokens
from evictbench.cache.layers import CacheLayer, EvictingLayer, FixedLayer
from evictbench.cache.rope import fixed_frequencies_below
from evictbench.cache.rows import Sequence
from evictbench.errors import UserError
from evictbench.policy.base import BasePolicy
from evictbench.policy.budget import Budget
from evictbench.policy.declarations import Prefill, check_object
from evictbench.policy.layer_kinds import layer_kinds
from evictbench.policy.step import Activation, ModelShape

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PreTrainedModel

    from evictbench.cache.softmax import Softmax

ONE_GENERATION = (
    "a cache serves one generation. Make a new one for the next text, or copy one with copy.deepcopy after the context."
)


class KVCache(Cache, ABC):
    """A KV cache under an eviction policy.

    model: the model that will be given the cache. Its sizes and rotary frequencies are read, and its attention
    implementation is set to "evictbench". policy: with its weights, if it is learned. budget: entries per KV head that
    a decode query may see, itself included (a `Budget`, an int, or a text such as "25%"). prefill: "native" (the
    policy's own), "dense" or "bounded". prompt_length: tokens until the prompt ends and is cut for good; None: the
    first forward pass is the prompt. rows: room for so many sequences that are admitted one by one; None: as many as
    the first pass has.

    rows: one `Sequence` for each row. columns: tokens seen, padding included. prompt_done: the prompt has ended. clock:
    told what each part of a pass takes, if it is set. bytes: counts what is held. layers: one for each layer of the
    model; evicting: those from which the policy evicts; attending: those that attend through the cache, in order.
    Raises UserError for a missing or impossible budget.
    """

    layers: list[Any]
    evicting: list[Any]
    policy: BasePolicy

    def __init__(
        self,
        model: PreTrainedModel,
        policy: BasePolicy,
        budget: Budget | int | str | None = None,
        *,
        prefill: Prefill = "native",
        prompt_length: int | None = None,
        rows: int | None = None,
    ) -> None:
        self.shape = ModelShape.of(model.config)
        check_object(policy, self.shape)
        self.budget = policy.read_budget(budget)
        self.policy = policy
        self.mode = policy.prefill_mode(prefill)
        self.prompt_length = prompt_length
        self.row_capacity = rows
        self.fixed_frequencies_below = fixed_frequencies_below(model.config)
        self.clock: Clock = NullClock()
        self.bytes = ByteCounter()
        self._model = weakref.ref(model)
        if self.budget is not None:
            policy.check_budget(self.budget)
            if self.budget.tokens is not None:
                policy.check_entries(self.budget.tokens, self.shape)
        self.evicting = [self.new_layer(index) for index in range(self.shape.layers)]
        self.attending: list[CacheLayer] = []
        super().__init__(layers=self._layers_of(model))
        use(model)
        self.reset()

    @abstractmethod
    def new_layer(self, index: int) -> EvictingLayer:
        """A layer without entries, from which the policy evicts."""

    def _layers_of(self, model: PreTrainedModel) -> list[Any]:
        """A cache layer for each layer of the model."""
        evicting = iter(self.evicting)
        layers: list[Any] = []
        for number, kind in enumerate(layer_kinds(model.config)):
            layer: Any = next(evicting) if kind.evicts else fixed_layer(self, kind, model.config)
            if isinstance(layer, CacheLayer):
                layer.number, layer.turn = number, len(self.attending)
                self.attending.append(layer)
                if kind.state:
                    layer = StatefulLayer(number_of_states(model.config), layer)
            layers.append(layer)
        return layers

    @property
    def fixed(self) -> list[FixedLayer]:
        """The layers, and parts of layers, that no policy sees."""
        windows = [layer for layer in self.attending if isinstance(layer, WindowLayer)]
        return [*windows, *(layer for layer in self.layers if not isinstance(layer, CacheLayer))]

    def reset(self) -> None:
        """Forget every sequence and free everything."""
        self.rows: list[Sequence] = []
        self.columns = 0
        self.prompt_done = False
        self.current: ForwardPlan | None = None
        self.bytes.held = self.bytes.peak = self._state_bytes = 0
        self._recognised = False
        for layer in (*self.evicting, *self.fixed):
            layer.forget()

    @property
    def model(self) -> PreTrainedModel:
        """The model that the cache was made for."""
        model = self._model()
        if model is None:
            raise RuntimeError("The model of this cache is gone.")
        return model

    # What is held.

    @property
    def seen(self) -> list[int]:
        """Tokens that each row has read."""
        return [row.seen for row in self.rows]

    @property
    def bytes_held(self) -> int:
        """Bytes of everything held now, by count."""
        return self.bytes.held

    @property
    def bytes_peak(self) -> int:
        """The most bytes that have been held."""
        return self.bytes.peak

    @abstractmethod
    def evictable_bytes(self) -> int:
        """Bytes held in the layers that evict, by looking: keys, values, positions and the policy's state."""

    def fixed_bytes(self) -> int:
        """Bytes held in the other layers, by looking."""
        return sum(layer.nbytes() for layer in self.fixed)

    def nbytes(self) -> int:
        """Bytes of everything held now, by looking."""
        return self.evictable_bytes() + self.fixed_bytes()

    @abstractmethod
    def row_bytes(self, row: int) -> int:
        """Bytes of one row's part of what is held."""

    @abstractmethod
    def kept(self, layer: int, row: int = 0) -> Tensor:
        """The positions that a layer holds of a row, ascending: `[sets, held]` int64. Where heads hold different
        numbers of entries, a head's positions are padded with -1 at the end."""

    @abstractmethod
    def entries_held(self) -> tuple[Tensor | float, Tensor | float]:
        """Entries that a KV head holds, the most and the mean; on the device where only that knows."""

    # One forward pass.

    def begin(self, module: Any, keys: Tensor, real: Tensor | None) -> ForwardPlan:
        """Before the first layer attends: plan the pass and make room.

        module: the first layer's attention; None if nobody knows it. keys: its new keys `[rows, kv_heads, new,
        head_dim]`. real: which new tokens are not padding, `[rows, new]` bool; None: all.
        """
        rows, _, queries, _ = keys.shape
        if self.current is not None:
            raise RuntimeError("The last forward pass through this cache did not finish; reset() it first.")
        if not self._recognised and module is not None:
            self._recognise(module)
        if not self.prompt_done and self.columns == 0:
            self.rows = self.rows or [Sequence() for _ in range(rows)]
            self.check_rows(rows)
        if rows != len(self.rows):
            raise UserError(
                f"This cache holds {len(self.rows)} {'sequence' if len(self.rows) == 1 else 'sequences'} and was given "
                f"{rows}: {ONE_GENERATION}"
            )
        columns = self.columns + queries
        if real is not None and real.dim() != 2:
            raise UserError(
                f"An eviction policy takes the attention mask of a padded batch, [rows, tokens], and not one of "
                f"{real.dim()} dimensions."
            )
        if getattr(real, "text_length", columns) != columns:
            raise self._second_text()
        if queries == 1 and not self.prompt_done and real is not None and not bool(real.all()):
            raise UserError("A left-padded batch cannot be read in chunks of one token: give larger chunks.")
        counts, real = real_tokens(queries, rows, real)
        self._check_frequencies(counts)
        ends_prompt = False
        if not self.prompt_done:
            length = columns if self.prompt_length is None else self.prompt_length
            ends_prompt = columns >= length
            for row, count in zip(self.rows, counts, strict=True):
                row.prompt = length - (columns - row.seen - count)
        plan = self.plan(queries, counts, real, ends_prompt)
        self.open(plan, keys)
        self.current = plan
        return plan

    @abstractmethod
    def plan(self, queries: int, counts: list[int], real: Tensor | None, ends_prompt: bool) -> ForwardPlan:
        """Return the plan of the next pass. Arguments as in `ForwardPlan.make`."""

    @abstractmethod
    def open(self, plan: ForwardPlan, keys: Tensor) -> None:
        """Make room for a pass; keys: the first layer's new ones."""

    @abstractmethod
    def attend(
        self, layer: Any, plan: ForwardPlan, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax
    ) -> Tensor:
        """Attention of one layer, and what follows from it for this layer. The output is shaped like query."""

    def close(self, plan: ForwardPlan) -> None:
        """After the last layer: take over what the pass has changed."""
        for row, seen, held in zip(self.rows, plan.seen, plan.held, strict=True):
            row.seen, row.held = seen, held
        self.columns += plan.queries
        self.prompt_done = self.prompt_done or plan.ends_prompt
        self.current = None
        self._count_states()

    def _count_states(self) -> None:
        """Count the bytes of the states that transformers' own layers hold."""
        held = sum(layer.nbytes() for layer in self.fixed if not isinstance(layer, CacheLayer))
        self.bytes.add(held - self._state_bytes)
        self._state_bytes = held

    def check_rows(self, rows: int) -> None:
        """Raise UserError where a first pass of so many rows lacks something that the policy needs."""

    def set_labels(self, labels: list[Tensor]) -> None:
        """Labels of the tokens of the one sequence that comes next, `[kv_heads, tokens]` a layer, for a policy that
        `needs_labels`."""
        self.rows = [Sequence(labels=labels)]

    def check_positions(self, positions: Tensor) -> None:
        """Raise UserError if a row's first new token stands before what it has seen. positions: `[1 or rows, new]`."""
        first = positions[:, 0].tolist() * (len(self.rows) if positions.shape[0] == 1 else 1)
        if any(position < row.seen for position, row in zip(first, self.rows, strict=False)):
            raise self._second_text()

    def _check_frequencies(self, counts: list[int]) -> None:
        """Refuse a text whose length changes the rotary frequencies: keys that are cached were rotated by others, and
        the answer would depend on chunks and on the other rows."""
        below = self.fixed_frequencies_below
        longest = max(row.seen + count for row, count in zip(self.rows, counts, strict=True))
        if below is not None and longest >= below:
            raise UserError(
                f"The rotary frequencies of this model change with the length of the text from {below} tokens on "
                f"(dynamic NTK or LongRoPE), and keys that are cached cannot follow: texts have to be shorter, and "
                f"this one has {longest} tokens."
            )

    def __bool__(self) -> bool:
        """True, but for a model whose rotary frequencies change with the length of the text. Phi-3's `generate` asks
        it, and would go on without this cache in place of meeting the refusal."""
        return self.fixed_frequencies_below is None

    def _second_text(self) -> UserError:
        return UserError(
            f"This cache has seen {self.columns} tokens, and was given a text that does not go on from there: "
            f"{ONE_GENERATION}"
        )

    def _recognise(self, module: Any) -> None:
        """Refuse another model than the one that the cache was made for."""
        model = self._model()
        if model is not None and not any(own is module for own in model.modules()):
            raise UserError("This cache was made for another model: make one of the model that it is given to.")
        self._recognised = True

    # Rows that come and go.

    @abstractmethod
    def admit(self, prompt: Any) -> int:
        """Copy what a one-row cache holds after its prompt into the next free row; returns that row.

        prompt: a cache of the same model, policy and budget. This cache was made with `rows`.
        """

    @abstractmethod
    def release(self, row: int) -> None:
        """End the sequence in a row; the last row takes its place."""

    def admit_fixed(self, prompt: KVCache, row: int) -> None:
        """Copy what the layers that do not evict hold of a one-row cache into a row."""
        for layer, source in zip(self.fixed, prompt.fixed, strict=True):
            layer.copy_row(source, 0, row)
        self._count_states()

    def release_fixed(self, row: int) -> None:
        """In the layers that do not evict, let the last row take the place of another, and end."""
        last = len(self.rows) - 1
        for layer in self.fixed:
            if row != last:
                layer.copy_row(layer, last, row)
            layer.drop_last_row()
        self._count_states()

    def next_free_row(self) -> int:
        """The row that `admit` fills next."""
        row = len(self.rows)
        if self.row_capacity is None or row >= self.row_capacity:
            raise RuntimeError(f"All {self.row_capacity} rows of this cache are taken.")
        return row

    # Hooks.

    def listen(self, names: Collection[Activation]) -> None:
        """Call `on_activation` for these activations in every pass through this cache, as long as it lives."""
        self._listens_to = frozenset(names)
        if not names:
            return
        cache = weakref.ref(self)

        def on_activation(layer: int, name: Activation, tensor: Tensor) -> Tensor | None:
            own = cache()
            assert own is not None
            own.clock.lap(REST, tensor.device)
            changed = own.on_activation(layer, name, tensor)
            own.clock.lap(SIGNALS, tensor.device)
            return changed

        handles = hooks.register(self.model, names, on_activation, self)
        weakref.finalize(self, hooks.remove, handles)

    def on_activation(self, layer: int, name: Activation, tensor: Tensor) -> Tensor | None:
        """Take an activation of a layer; the result replaces queries before their rotation, if it is not None."""
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """A cache with the same entries, of the same model and policy. What either goes on to see, the other does not.

        Raises RuntimeError in the middle of a forward pass.
        """
        if self.current is not None:
            raise RuntimeError("A cache cannot be copied in the middle of a forward pass.")
        for shared in (self.policy, self.clock):
            memo[id(shared)] = shared
        other: KVCache = object.__new__(type(self))
        memo[id(self)] = other
        vars(other).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        for layer in other.attending:
            layer.belong_to(other)
        other.listen(getattr(self, "_listens_to", ()))
        return other

    # What transformers may ask.

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys a mask would have, and the number by which `attention.mask` knows a cache of ours. Raises
        UserError for a pass without a new token."""
        if query_length == 0:
            raise self._second_text()
        return self.columns + query_length, OURS

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, not kept; padding of a left-padded batch included."""
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams would share evicted entries."""
        raise UserError("Beam search is not supported under an eviction policy; sample or decode greedily.")

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Assisted decoding takes tokens back; what they evicted is gone."""
        raise UserError("A cache that evicts cannot take tokens back; assisted decoding is not supported.")
