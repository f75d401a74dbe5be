"""Activations that attention never sees: a layer's input, its attention's input, its queries before their rotation.

Forward hooks read them, and only those that are asked for are set. Nothing is kept here: each tensor goes to the caller
while its layer runs, on the device where the layer's own arithmetic has it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evictbench.errors import UserError
from evictbench.policy.layer_kinds import layer_kinds
from evictbench.policy.step import ACTIVATIONS, Activation

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

OnActivation = Callable[[int, Activation, Tensor], Tensor | None]
"""A function that gets (layer, name, tensor) once per layer and pass. The layer goes on with the tensor that it returns
in place of the queries, and unchanged if it returns None. For the other activations its result is ignored."""


@contextmanager
def hooked(model: PreTrainedModel, names: Collection[Activation], on_activation: OnActivation) -> Iterator[None]:
    """Call `on_activation` for the named activations of every forward pass inside the block.

    Under gradient checkpointing an activation may come again when its layer is computed again. Errors as of
    `register`.
    """
    handles = register(model, names, on_activation)
    try:
        yield
    finally:
        remove(handles)


def register(
    model: PreTrainedModel, names: Collection[Activation], on_activation: OnActivation, cache: object | None = None
) -> list[RemovableHandle]:
    """Set the hooks that call `on_activation` for the named activations of a model.

    cache: only passes that are given this cache count; None: all passes. It is held by a weak reference. A layer's
    input may still lie on the device of the layer before it. Raises UserError if the model has no such activations.
    """
    if unknown := set(names) - ACTIVATIONS:
        raise ValueError(f"no activation is called {', '.join(sorted(unknown))}")
    handles: list[RemovableHandle] = []
    passes = _Passes(cache)
    try:
        for index, (layer, attention) in enumerate(_evicting_layers(model) if names else ()):
            if "residual" in names:
                handles.append(_before(layer, index, "residual", on_activation, passes))
            if "normed_hidden" in names:
                handles.append(_before(attention, index, "normed_hidden", on_activation, passes))
            if "pre_rope_queries" in names:
                handles.append(attention.register_forward_pre_hook(passes.enter, with_kwargs=True))
                handles.append(_queries(model, attention, index, on_activation, passes))
    except BaseException:
        remove(handles)
        raise
    return handles


def remove(handles: Collection[RemovableHandle]) -> None:
    """Remove hooks."""
    for handle in handles:
        handle.remove()


class _Passes:
    """Tells the forward passes of one cache from all others: transformers gives every module the cache."""

    def __init__(self, cache: object | None) -> None:
        self._cache = None if cache is None else weakref.ref(cache)
        self._inside = False

    def counts(self, named: dict[str, Any]) -> bool:
        """Whether a module's keyword arguments belong to a pass that counts."""
        if self._cache is None:
            return True
        cache = self._cache()
        return cache is not None and any(value is cache for value in named.values())

    def enter(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A layer's attention begins; modules inside it do not get the cache."""
        self._inside = self.counts(named)

    def take_query(self) -> bool:
        """Whether queries that are computed now belong to a pass that counts; each attention computes them once."""
        inside, self._inside = self._inside, False
        return inside or self._cache is None


def _evicting_layers(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """The decoder layers that evict in order, each with its attention."""
    layers: dict[int, tuple[nn.Module, nn.Module]] = {}
    # Where they nearly always are; a walk through all modules takes longer than a small model's decode step can spare.
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for layer in getattr(decoder, "layers", None) or model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if (index := getattr(attention, "layer_idx", None)) is not None:
            layers[index] = layer, attention
    expected = [number for number, kind in enumerate(layer_kinds(model.config)) if kind.evicts]
    if not layers.keys() >= set(expected):
        raise UserError(f"The layers of {type(model).__name__} are built in a way that hidden states cannot be read.")
    return [layers[index] for index in expected]


def _before(
    module: nn.Module, index: int, name: Activation, on_activation: OnActivation, passes: _Passes
) -> RemovableHandle:
    def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if passes.counts(named):
            on_activation(index, name, arguments[0] if arguments else named["hidden_states"])

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _queries(
    model: PreTrainedModel, attention: nn.Module, index: int, on_activation: OnActivation, passes: _Passes
) -> RemovableHandle:
    """A hook on the module whose output is rotated next: the query norm, the query projection, or the fused one."""
    text = model.config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = text.num_attention_heads * head_dim
    candidates = (getattr(attention, name, None) for name in ("q_norm", "q_proj", "qkv_proj"))
    module = next((candidate for candidate in candidates if candidate is not None), None)
    if module is None:
        raise UserError(
            f"The attention of {type(model).__name__} is built in a way that its queries cannot be read before "
            "their rotation."
        )

    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not passes.take_query():
            return None
        by_head = output.dim() == 4
        queries = output if by_head else output[..., :width].unflatten(-1, (-1, head_dim))
        changed = on_activation(index, "pre_rope_queries", queries)
        if changed is None or by_head:
            return changed
        flat = changed.flatten(-2)
        return flat if output.shape[-1] == width else torch.cat([flat, output[..., width:]], dim=-1)

    handle: RemovableHandle = module.register_forward_hook(hook)
    return handle
