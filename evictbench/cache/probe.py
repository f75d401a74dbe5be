"""What the layers of a model hand to attention, read from one pass of one token: on weights, or on the meta device.

A config says little about that, and each model family says it in its own words. The pass says it for every layer.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionLayer

from evictbench.cache.attention import OURS, Unsupported, carry, use
from evictbench.policy.layer_kinds import LayerKind, layer_kinds
from evictbench.policy.step import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.softmax import Softmax


@dataclass(frozen=True)
class Handed:
    """What one layer handed to attention for one token.

    module: the attention module. heads, width: of the query. key: `[1, kv_heads, 1, head_dim]`, as cached.
    value_width: of each value. window: the tokens that the layer's mask lets a query see at most; None: all.
    """

    module: Any
    heads: int
    width: int
    key: Tensor
    value_width: int
    window: int | None


class _Layer(CacheLayerMixin):
    """A cache layer that holds nothing and notes what attention is given."""

    def __init__(self, kind: LayerKind, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = number
        self.awaits_attention = False
        self.kind = kind
        self.is_sliding = kind.holds in ("window", "chunk")
        self.window = kind.size
        self.updated = False
        self.handed: Handed | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.updated = self.awaits_attention = True
        return carry(key_states, self), value_states

    def attend(
        self, module: Any, query: Tensor, keys: Tensor, values: Tensor, real: Tensor | None, softmax: Softmax
    ) -> Tensor:
        """One token sees itself alone: the output is its value."""
        self.awaits_attention = False
        window = getattr(real, "window", None)
        self.handed = Handed(module, query.shape[1], query.shape[3], keys, values.shape[3], window)
        return values.repeat_interleave(query.shape[1] // values.shape[1], dim=1)

    def check_positions(self, positions: Tensor | None) -> None:
        """Any position will do."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: there are no buffers."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, OURS

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _Cache(Cache):
    """A cache of such layers, whatever they are."""

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, OURS

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the argument that takes a cache; transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model can be told the positions of its tokens."""
    return "position_ids" in inspect.signature(model.forward).parameters


def hand_over(model: PreTrainedModel, position: int = 0) -> dict[int, Handed]:
    """What each layer with attention hands to it for one token at this position, which sees nothing but itself, by the
    layer's number.

    The model attends through evictbench afterwards. Raises Unsupported where a layer attends past its cache, or is
    given an argument that the cache does not know.
    """
    use(model)
    noting = {number: _Layer(kind, number) for number, kind in enumerate(layer_kinds(model.config))}
    layers = [_cache_layer(layer) for layer in noting.values()]
    tokens = torch.ones((1, 1), dtype=torch.long, device=model.device)
    named: dict[str, Any] = {
        cache_argument(model): _Cache(layers=layers),
        "use_cache": True,
        "attention_mask": tokens,
    }
    if takes_positions(model):
        named["position_ids"] = torch.full((1, 1), position, device=model.device)
    training = [module for module in model.modules() if module.training]
    model.eval()  # a model in training attends with dropout
    try:
        with torch.no_grad():
            model(input_ids=tokens, **named)
    finally:
        for module in training:
            module.training = True
    found = {}
    for index, layer in noting.items():
        if layer.kind.holds in ("state", "nothing"):
            continue
        if not layer.updated:
            raise Unsupported(f"its layer {index} puts no keys and values into the cache")
        if layer.handed is None:
            raise Unsupported(f"its layer {index} attends with other keys than those that it puts into the cache")
        found[index] = layer.handed
    return found


class _Stateful(LinearAttentionLayer):
    """A layer of the probe that has a state besides."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.is_sliding = layer.is_sliding
        self.update = layer.update


def _cache_layer(layer: _Layer) -> Any:
    """What transformers is given in place of a layer that notes."""
    if layer.kind.holds == "state":
        return LinearAttentionLayer()
    if layer.kind.state:
        return _Stateful(layer)
    return DummyLayer() if layer.kind.holds == "nothing" else layer


def check_layers(model: PreTrainedModel) -> None:
    """Raise Unsupported where a layer is not the attention that the config describes, naming it and what differs.

    The model may lie on the meta device, without weights.
    """
    shape, kinds = ModelShape.of(model.config), layer_kinds(model.config)
    modules: dict[Any, int] = {}
    for index, layer in hand_over(model).items():
        where = f"its layer {index} ({type(layer.module).__name__})"
        if (earlier := modules.setdefault(layer.module, index)) != index:
            raise Unsupported(f"its layers {earlier} and {index} are one and the same, read twice")
        if layer.window != kinds[index].size and not (kinds[index].evicts and _never_slides(model, layer.window)):
            raise Unsupported(
                f"{where} masks all but the last {layer.window} tokens, and its config says {kinds[index].size}"
            )
        if not kinds[index].evicts:
            continue
        key_heads, key_width = layer.key.shape[1], layer.key.shape[3]
        for what, found, stated in (
            ("query heads", layer.heads, shape.heads),
            ("KV heads", key_heads, shape.kv_heads),
            ("elements a key", key_width, shape.head_dim),
            ("elements a value", layer.value_width, shape.value_dim or shape.head_dim),
            ("elements a query", layer.width, shape.head_dim),
        ):
            if found != stated:
                raise Unsupported(f"{where} has {found} {what}, and its config says {stated}")


def _never_slides(model: PreTrainedModel, window: int | None) -> bool:
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return bool(window and longest and window >= longest)
