"""A layer of a cache, as transformers and the attention function see it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from evictbench.cache.attention import carry
from evictbench.cache.clock import POLICY, REST
from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.cache.buffers import ByteCounter
    from evictbench.cache.clock import Clock
    from evictbench.cache.forward_plan import ForwardPlan
    from evictbench.cache.softmax import Softmax
    from evictbench.policy.step import ModelShape


class LayeredCache(Protocol):
    """A cache as its layers see it: a `KVCache`, which says what each of these is."""

    attending: list[CacheLayer]
    bytes: ByteCounter
    clock: Clock
    columns: int
    current: ForwardPlan | None
    prompt_done: bool
    row_capacity: int | None
    shape: ModelShape

    def begin(self, module: Any, keys: Tensor, real: Tensor | None) -> ForwardPlan:
        """Plan a pass, before the first layer attends."""

    def attend(
        self, layer: Any, plan: ForwardPlan, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax
    ) -> Tensor:
        """Attention of a layer that evicts, and what follows from it."""

    def close(self, plan: ForwardPlan) -> None:
        """End a pass, after the last layer."""

    def check_positions(self, positions: Tensor) -> None:
        """Raise UserError for tokens that do not go on from what was seen."""

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys of a mask, and where they begin."""


class CacheLayer(CacheLayerMixin):
    """One layer of a cache: hands new keys on to the attention function, which finds the layer on them.

    number: of the layer in the model. turn: its place among the layers of the cache that attend through it. window:
    the tokens that a query sees at most; None: no such limit.
    """

    is_sliding = False
    window: int | None = None

    def __init__(self, cache: LayeredCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = self.turn = 0
        self.bytes = cache.bytes
        self.awaits_attention = False
        self.belong_to(cache)

    def belong_to(self, cache: LayeredCache) -> None:
        """Make this a layer of `cache`, which it does not keep alive."""
        self._cache = weakref.ref(cache)

    @property
    def cache(self) -> LayeredCache:
        """The cache that this is a layer of."""
        cache = self._cache()
        assert cache is not None
        return cache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values on to the attention function."""
        if self.awaits_attention or (self.turn and self.cache.attending[self.turn - 1].awaits_attention):
            raise UserError(
                "This cache was given to a model that does not attend through it: call "
                "model.set_attn_implementation('evictbench') and keep it while the cache is in use, or make a cache of "
                "this model."
            )
        self.awaits_attention = True
        return carry(key_states, self), value_states

    def check_positions(self, positions: Tensor | None) -> None:
        """Raise UserError for new tokens that begin before what a row has seen: it is another text.

        positions: `[1 or rows, new]`; None: nobody knows them. On a GPU only chunks after the prompt are looked at, so
        that decoding never waits for it.
        """
        if self.turn or positions is None or positions.dim() != 2 or not self.cache.prompt_done:
            return
        if positions.shape[1] > 1 or positions.is_cpu:
            self.awaits_attention = False  # a cache that refuses a text can go on with its own
            self.cache.check_positions(positions)

    def attend(
        self, module: Any, query: Tensor, keys: Tensor, values: Tensor, real: Tensor | None, softmax: Softmax
    ) -> Tensor:
        """Attention of this layer, and all that follows from it; as of `attention.AttendingLayer`."""
        self.awaits_attention = False
        cache = self.cache
        cache.clock.lap(REST, query.device)
        plan = cache.begin(module, keys, real) if self.turn == 0 else cache.current
        assert plan is not None
        output = self.attend_in(plan, query, keys, values, softmax)
        if self.turn == len(cache.attending) - 1:
            cache.close(plan)
        cache.clock.lap(POLICY, query.device)
        return output

    def attend_in(self, plan: ForwardPlan, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Attention of this layer within a planned pass. The output is shaped like query."""
        return self.cache.attend(self, plan, query, keys, values, softmax)

    def forget(self) -> None:
        """Free everything."""
        self.awaits_attention = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: buffers are made when the first pass begins."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of the cache."""
        return self.cache.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """Tokens seen, not kept."""
        return self.cache.columns

    def get_max_length(self) -> int:
        """No maximum: what does not fit is evicted."""
        return -1


class EvictingLayer(CacheLayer):
    """A layer from which the policy evicts. index: its number among those of the cache."""

    def __init__(self, cache: LayeredCache, index: int) -> None:
        super().__init__(cache)
        self.index = index


class FixedLayer(Protocol):
    """A layer that no policy sees."""

    def nbytes(self) -> int:
        """Bytes of every storage that the layer holds."""

    def forget(self) -> None:
        """Free everything."""

    def copy_row(self, source: Any, source_row: int, row: int) -> None:
        """Copy a row of such a layer, this one or another cache's, into a row that exists or is the next one."""

    def drop_last_row(self) -> None:
        """The sequence in the last row has ended."""
