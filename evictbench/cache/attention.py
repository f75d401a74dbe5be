"""The attention function that transformers calls in every layer.

It is registered under the name "evictbench". The keys that the model passes are the new ones, and they carry the cache
layer, which does the rest; without a cache this is plain causal attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from evictbench.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "evictbench"

DenseAttention = Callable[[int, torch.nn.Module, Tensor, Tensor, Tensor, float], Tensor | None]
"""Attention of a pass without a cache, given to the model as `dense_attention=`. It gets the layer's index, the
attention module, the rotated query `[rows, heads, S, head_dim]`, the key and the value `[rows, kv_heads, S, head_dim]`
and the scaling, and returns the output `[rows, heads, S, head_dim]`, or None for plain causal attention."""


NO_CHANGE = frozenset(
    {
        "cache_position",
        "dense_attention",
        "num_items_in_batch",
        "output_router_logits",
        "position_ids",
        "token_type_ids",
        "use_cache",
    }
)
"""Arguments that transformers passes to attention and that change nothing in it, whatever their value."""

NO_EFFECT: dict[str, Any] = {"dropout": 0.0, "is_causal": True}
"""Values of arguments at which they have no effect. None and False have none for any argument."""


class Unsupported(UserError):
    """A model that cannot be measured. reason: why, as a part of a sentence about the model."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"This model cannot be measured: {reason}.")
        self.reason = reason


class AttendingLayer(Protocol):
    """A cache layer that keys carry."""

    def get_seq_length(self) -> int:
        """Tokens seen before this pass."""

    def attend(
        self, module: Any, query: Tensor, keys: Tensor, values: Tensor, real: Tensor | None, scaling: float
    ) -> Tensor:
        """The layer's attention, and all that follows from it.

        query: `[rows, heads, new, head_dim]`. keys, values: `[rows, kv_heads, new, head_dim]`, the new ones. real:
        `[rows, new]` bool, which new tokens are not padding; None: all. The output is shaped like query.
        """


def use(model: PreTrainedModel) -> None:
    """Set a model's attention to this module's."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if model.config._attn_implementation != NAME:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, new_token_mask)
        model.set_attn_implementation(NAME)


def carry(keys: Tensor, layer: AttendingLayer) -> Tensor:
    """The keys, with the cache layer on them."""
    carrying = keys.view_as(keys)
    carrying.cache_layer = layer  # type: ignore[attr-defined]
    return carrying


def new_token_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Which of the new tokens are not padding, `[rows, new]` bool. Causality and slots are the cache's affair.

    The result has the number of all tokens, earlier ones included, as its attribute `text_length`.
    """
    if attention_mask is None:
        return None
    queries = kwargs.get("q_length")
    if queries is None:
        queries = kwargs["cache_position"].shape[0]
    real = attention_mask[:, -queries:].bool()
    real.text_length = attention_mask.shape[1]  # type: ignore[attr-defined]
    return real


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    query: `[rows, heads, new, head_dim]`. key, value: `[rows, kv_heads, new, head_dim]`, the new ones only.
    attention_mask: what `new_token_mask` returned. The output is `[rows, new, heads, head_dim]`. Without a cache,
    `dense_attention` in the model's keyword arguments replaces plain causal attention.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: AttendingLayer | None = getattr(key, "cache_layer", None)
    if layer is not None:
        refuse_unknown(module, kwargs, layer.get_seq_length() + query.shape[2])
        return layer.attend(module, query, key, value, attention_mask, scaling).transpose(1, 2), None
    dense: DenseAttention | None = kwargs.get("dense_attention")
    if dense is not None:
        refuse_unknown(module, kwargs, query.shape[2])
        output = dense(cast(int, module.layer_idx), module, query, key, value, scaling)
        if output is not None:
            return output.transpose(1, 2), None
    return _causal(query, key, value, attention_mask, scaling), None


def refuse_unknown(module: Any, arguments: Mapping[str, Any], length: int) -> None:
    """Raise Unsupported for an argument to attention that the cache does not know, naming the layer and the argument.

    length: tokens of the text so far. A sliding window that is no shorter slides over nothing.
    """
    for name, value in arguments.items():
        if name in NO_CHANGE or value is None or value is False or (name in NO_EFFECT and value == NO_EFFECT[name]):
            continue
        if name == "sliding_window" and length <= value:
            continue
        layer = getattr(module, "layer_idx", None)
        shown = f"{name}={value}" if isinstance(value, (bool, int, float, str)) else f"`{name}`"
        raise Unsupported(
            f"its layer {layer} ({type(module).__name__}) attends with {shown}, which an eviction cache does not do"
        )


def _causal(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scaling: float) -> Tensor:
    """Plain causal attention over a padded batch, `[rows, new, heads, head_dim]`."""
    if real is None or bool(real.all()):
        mask = None
    else:
        queries = query.shape[2]
        causal = torch.ones(queries, queries, dtype=torch.bool, device=query.device).tril()
        itself = torch.eye(queries, dtype=torch.bool, device=query.device)
        mask = (causal & real[:, None, None, :]) | itself
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2)
