"""The features that KVpop's scorers learn from, recorded in a dense pass of the frozen model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from evictbench.cache.attention import use
from evictbench.cache.rope import inverse_frequencies, rotate
from evictbench.policy.future_attention import future_labels

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


class Recorder:
    """A `dense_attention` that only records: un-rotated keys, values and both labels of every layer.

    recorded: by name, a tensor for each layer: keys and values `[rows, kv_heads, S, head_dim]`; mean and max
    `[rows, kv_heads, S]`, log(epsilon + attention). window: positions behind which labels begin. dtype: of the records.
    """

    def __init__(self, model: PreTrainedModel, window: int, dtype: torch.dtype) -> None:
        self.inv_freq = inverse_frequencies(model, "kvpop")
        self.window = window
        self.dtype = dtype
        self.recorded: dict[str, list[Tensor]] = {"keys": [], "values": [], "mean": [], "max": []}

    def __call__(
        self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> None:
        """Record one layer. query `[rows, heads, S, head_dim]`, key, value `[rows, kv_heads, S, head_dim]`, rotated."""
        tensors = {"keys": unrotated(key, self.inv_freq.to(key.device)), "values": value}
        for label in ("mean", "max"):
            tensors[label] = future_labels(query, key, window=self.window, scaling=scaling, label=label)
        for name, tensor in tensors.items():
            self.recorded[name].append(tensor.detach().to(self.dtype))

    def features(self) -> dict[str, Tensor]:
        """The records by name, stacked over layers: `[rows, layers, kv_heads, ...]`, on the CPU."""
        return {name: torch.stack([tensor.cpu() for tensor in layers], dim=1) for name, layers in self.recorded.items()}


def unrotated(keys: Tensor, inv_freq: Tensor) -> Tensor:
    """Keys `[.., S, head_dim]` of positions 0 .. S - 1 as before RoPE. inv_freq: the inverse rotary frequencies."""
    return rotate(keys, -torch.arange(keys.shape[-2], device=keys.device), inv_freq)


def record(model: PreTrainedModel, tokens: Tensor, window: int) -> dict[str, Tensor]:
    """The features of blocks of tokens `[rows, S]`, in float16 on the CPU: keys and values `[rows, layers, kv_heads, S,
    head_dim]`, mean and max `[rows, layers, kv_heads, S]`. window: positions behind which labels begin."""
    use(model)
    recorder = Recorder(model, window, torch.float16)
    with torch.no_grad():
        model(input_ids=tokens.to(model.device), use_cache=False, logits_to_keep=1, dense_attention=recorder)
    return recorder.features()
