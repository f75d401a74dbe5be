"""The attention function that transformers calls in every layer.

It is registered under the name "evictbench", beside a mask function. Both know a pass through a cache of ours: it
says `OURS` to the mask function, and the keys that the model passes are the new ones and carry the cache layer, which
does the rest. Every other pass, with whatever cache or none, is transformers' own "sdpa" in both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from evictbench.cache.softmax import Softmax
from evictbench.errors import UserError
from evictbench.policy.layer_kinds import layer_kinds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "evictbench"

DenseAttention = Callable[[int, torch.nn.Module, Tensor, Tensor, Tensor, float], Tensor | None]
"""Attention of the layers that evict in a pass without a cache, given to the model as `dense_attention=`. It gets the
layer's number among those that evict, the attention module, the rotated query `[rows, heads, S, head_dim]`, the key and
the value `[rows, kv_heads, S, head_dim]` and the scaling, and returns the output `[rows, heads, S, head_dim]`, or None
for transformers' own attention."""


OURS = -1
"""Where the keys begin, as a cache of ours tells transformers: the mask function knows it by this. Other caches say 0
or more. A plain number, so that a compiled model can carry it."""


NO_CHANGE = frozenset(
    {
        "cache_position",
        "dense_attention",
        "num_items_in_batch",
        "output_router_logits",
        "position_ids",
        "s_aux",
        "softcap",
        "token_type_ids",
        "use_cache",
    }
)
"""Arguments that transformers passes to attention and that change nothing in it, or that are read (s_aux, softcap)."""

NO_EFFECT: dict[str, Any] = {"dropout": 0.0, "is_causal": True}
"""Values of arguments at which they have no effect. None and False have none for any argument."""


class Unsupported(UserError):
    """A model that cannot be measured. reason: why, as a part of a sentence about the model."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"This model cannot be measured: {reason}.")
        self.reason = reason


class AttendingLayer(Protocol):
    """A cache layer that keys carry. number: of the layer in the model. window: the most tokens that a query of it
    sees; None: all. awaits_attention: it was given keys that have not attended yet."""

    number: int
    window: int | None
    awaits_attention: bool

    def check_positions(self, positions: Tensor | None) -> None:
        """Raise UserError for new tokens that do not go on from what has been seen. positions: `[1 or rows, new]`."""

    def get_seq_length(self) -> int:
        """Tokens seen before this pass."""

    def attend(
        self, module: Any, query: Tensor, keys: Tensor, values: Tensor, real: Tensor | None, softmax: Softmax
    ) -> Tensor:
        """The layer's attention, and all that follows from it.

        query: `[rows, heads, new, head_dim]`. keys, values: `[rows, kv_heads, new, head_dim]`, the new ones. real:
        `[rows, new]` bool, which new tokens are not padding; None: all. The output is shaped like query, and as wide as
        the values.
        """


def use(model: PreTrainedModel) -> None:
    """Set a model's attention to this module's."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # Also where the model has the name: it may come from a process in which it was registered.
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)


def carry(keys: Tensor, layer: AttendingLayer) -> Tensor:
    """The keys, with the cache layer on them.

    Some models make other keys of them before they attend (multi-head latent attention). The layer is remembered for
    the attention that comes next, too.
    """
    carrying = keys.view_as(keys)
    carrying.cache_layer = layer  # type: ignore[attr-defined]
    _last.layer = weakref.ref(layer)
    return carrying


_last = threading.local()
"""layer: a weak reference to the cache layer that was given keys last, on this thread."""


def _layer_of(module: torch.nn.Module, key: Tensor) -> AttendingLayer | None:
    """The cache layer that keys belong to; None for a pass without a cache of ours."""
    layer: AttendingLayer | None = getattr(key, "cache_layer", None)
    if layer is None and (last := getattr(_last, "layer", None)) is not None:
        layer = last()
        if layer is None or not layer.awaits_attention or layer.number != getattr(module, "layer_idx", None):
            return None
    return layer


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of a pass: for a cache of ours, which new tokens are not padding, and otherwise sdpa's mask.

    Arguments as transformers gives them to a mask function. Raises UserError for a cache of ours if the model masks
    more than the future and padding.
    """
    offset = kwargs.get("kv_offset")
    if not (isinstance(offset, int) and offset == OURS):
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        sdpa_mask: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
        return sdpa_mask
    _check_causal(**kwargs)
    return new_token_mask(kwargs["q_length"], kwargs.get("attention_mask"), kwargs.get("local_size"))


def new_token_mask(queries: int, attention_mask: Tensor | None, window: int | None = None) -> Tensor | None:
    """Which of the new tokens are not padding, `[rows, new]` bool. Causality, windows and slots are the cache's affair.

    queries: how many tokens are new. attention_mask: `[rows, tokens]`, of all tokens that have been read; None: no
    padding. window: of the layers that the mask is for. The result has the number of all tokens as its attribute
    `text_length`, and the window as `window`.
    """
    if attention_mask is None:
        return None
    real = attention_mask[:, -queries:].bool()
    real.text_length, real.window = attention_mask.shape[1], window  # type: ignore[attr-defined]
    return real


def _check_causal(
    mask_function: Callable[..., Any] | None = None, local_size: int | None = None, **kwargs: Any
) -> None:
    """Raise UserError if a mask differs from the causal one and from that of a window, which a layer applies itself."""
    from transformers.masking_utils import causal_mask_function

    if local_size is None and mask_function not in (None, causal_mask_function):
        raise UserError(
            "This pass masks more than the future and padding (tokens that see later ones, for example), which is not "
            "supported under an eviction policy."
        )


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

    query: `[rows, heads, new, head_dim]`. key, value: `[rows, kv_heads, new, head_dim]`, the new ones only where they
    carry a layer of ours. attention_mask: what `mask` returned. The output is `[rows, new, heads, head_dim]`. Without a
    cache, `dense_attention` in the model's keyword arguments may replace transformers' own attention.
    """
    layer = _layer_of(module, key)
    softmax = Softmax(
        query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap"), kwargs.get("s_aux")
    )
    if layer is not None:
        refuse_unknown(module, kwargs, layer.get_seq_length() + query.shape[2], layer.window)
        if attention_mask is None:  # a mask says how long the text is
            layer.check_positions(kwargs.get("position_ids"))
        return layer.attend(module, query, key, value, attention_mask, softmax).transpose(1, 2), None
    dense: DenseAttention | None = kwargs.get("dense_attention")
    if dense is not None:
        index = _evicting_index(module)
        if index is not None:
            refuse_unknown(module, kwargs, query.shape[2])
            if not softmax.plain:
                raise Unsupported("its logits are capped or have sinks, which labels and training do not know")
            output = dense(index, module, query, key, value, softmax.scaling)
            if output is not None:
                return output.transpose(1, 2), None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    text_length: int | None = getattr(attention_mask, "text_length", None)
    if attention_mask is not None and text_length is not None:
        attention_mask = _without_our_cache(attention_mask, text_length)
    if not softmax.plain:  # torch's kernel knows neither
        return _attend_unplain(query, key, value, attention_mask, softmax).transpose(1, 2), None
    attended: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    return attended


def _attend_unplain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
    """Attention without a cache of ours, with capped logits or sinks. mask: sdpa's, True or 0 where a key is seen."""
    from evictbench.cache.kernels import attend_and_observe

    if mask is None:
        first = key.shape[2] - 1 if query.shape[2] == 1 else 0
        return attend_and_observe(query, key, value, None, softmax, causal_from=first, observe=False)[0]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    return attend_and_observe(query, key, value, mask[..., : key.shape[2]], softmax, observe=False)[0]


def _evicting_index(module: torch.nn.Module) -> int | None:
    """The number of an attention module's layer among those that evict; None for another layer."""
    if module not in _evicting:
        number = cast(int, module.layer_idx)
        kinds = layer_kinds(module.config)
        _evicting[module] = sum(kind.evicts for kind in kinds[:number]) if kinds[number].evicts else None
    return _evicting[module]


_evicting: WeakKeyDictionary[torch.nn.Module, int | None] = WeakKeyDictionary()


def refuse_unknown(module: Any, arguments: Mapping[str, Any], length: int, window: int | None = None) -> None:
    """Raise Unsupported for an argument to attention that the cache does not know, naming the layer and the argument.

    length: tokens of the text so far. A sliding window that is no shorter slides over nothing. window: the one that the
    layer of the cache applies.
    """
    for name, value in arguments.items():
        if name in NO_CHANGE or value is None or value is False or (name in NO_EFFECT and value == NO_EFFECT[name]):
            continue
        if name == "sliding_window" and (length <= value or value == window):
            continue
        layer = getattr(module, "layer_idx", None)
        shown = f"{name}={value}" if isinstance(value, (bool, int, float, str)) else f"`{name}`"
        raise Unsupported(
            f"its layer {layer} ({type(module).__name__}) attends with {shown}, which an eviction cache does not do"
        )


def _without_our_cache(real: Tensor, text_length: int) -> Tensor | None:
    """sdpa's mask in place of a `new_token_mask` whose cache transformers has left out: training with checkpoints.

    Raises UserError if the cache had seen tokens, which would be lost.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    rows, tokens = real.shape
    if text_length != tokens:
        raise UserError("Gradient checkpointing leaves out the cache, and this one has seen tokens: train without it.")
    sizes = {"batch_size": rows, "q_length": tokens, "kv_length": tokens}
    sdpa_mask: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**sizes, attention_mask=real, device=real.device)
    return sdpa_mask
