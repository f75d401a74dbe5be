"""What attention never sees: a layer's input, what its attention is given, its queries before they are rotated.

Read by forward hooks, which are set only for what is asked for and always removed. Nothing is kept here: each tensor
goes to the caller as the layer runs, on the device where the layer's own arithmetic has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.policy.step import TAPS, Tap

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel


Take = Callable[[int, Tap, "Tensor"], "Tensor | None"]
"""Gets (layer, name, tensor) once per layer and pass. The layer goes on with the tensor that it returns in place of
the queries, and unchanged where it returns None; what it returns for the other two is not used."""


@contextmanager
def tapped(model: PreTrainedModel, names: Collection[Tap], take: Take) -> Iterator[None]:
    """Hand `take` every named tensor of each forward pass made inside.

    A layer's input may still lie on the device of the layer before it. Under gradient checkpointing a tensor may be
    handed over again when its layer is computed again. Raises UserError where the model has no such tensors.
    """
    if unknown := set(names) - TAPS:
        raise ValueError(f"no tap is called {', '.join(sorted(unknown))}")
    handles: list[RemovableHandle] = []
    try:
        if names:
            for index, (layer, attention) in enumerate(_layers(model)):
                if "residual" in names:
                    handles.append(_before(layer, index, "residual", take))
                if "normed_hidden" in names:
                    handles.append(_before(attention, index, "normed_hidden", take))
                if "pre_rope_queries" in names:
                    handles.append(_queries(model, attention, index, take))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """The decoder layers in order, each with its attention."""
    found: dict[int, tuple[nn.Module, nn.Module]] = {}
    # Where they nearly always are; a walk through all modules takes longer than a small model's decode step can spare.
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for layer in getattr(decoder, "layers", None) or model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if (index := getattr(attention, "layer_idx", None)) is not None:
            found[index] = layer, attention
    layers = range(model.config.get_text_config(decoder=True).num_hidden_layers)
    if sorted(found) != list(layers):
        raise UserError(f"The layers of {type(model).__name__} are built in a way that hidden states cannot be read.")
    return [found[index] for index in layers]


def _before(module: nn.Module, index: int, name: Tap, take: Take) -> RemovableHandle:
    def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        take(index, name, arguments[0] if arguments else named["hidden_states"])

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _queries(model: PreTrainedModel, attention: nn.Module, index: int, take: Take) -> RemovableHandle:
    """After the module whose output is rotated next: the query norm, the query projection, or the fused one."""
    text = model.config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = text.num_attention_heads * head_dim
    names = ("q_norm", "q_proj", "qkv_proj")
    module = next((found for name in names if (found := getattr(attention, name, None)) is not None), None)
    if module is None:
        raise UserError(
            f"The attention of {type(model).__name__} is built in a way that its queries cannot be read before "
            "their rotation."
        )

    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        apart = output.dim() == 4
        queries = output if apart else output[..., :width].unflatten(-1, (-1, head_dim))
        changed = take(index, "pre_rope_queries", queries)
        if changed is None or apart:
            return changed
        flat = changed.flatten(-2)
        if output.shape[-1] == width:
            return flat
        import torch

        return torch.cat([flat, output[..., width:]], dim=-1)

    handle: RemovableHandle = module.register_forward_hook(hook)
    return handle
