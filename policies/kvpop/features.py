"""What KVpop's scorers see and learn from, out of a dense pass of the frozen model."""

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
    """`dense_attention` that only watches: un-rotated keys, values and both labels of every layer.

    keys, values: `[rows, kv_heads, S, head_dim]` a layer; mean, max: `[rows, kv_heads, S]`, log(epsilon + attention).
    dtype: what they are kept in.
    """

    def __init__(self, model: PreTrainedModel, window: int, dtype: torch.dtype) -> None:
        self.inv_freq = inverse_frequencies(model, "kvpop")
        self.window = window
        self.dtype = dtype
        self.found: dict[str, list[Tensor]] = {"keys": [], "values": [], "mean": [], "max": []}

    def __call__(
        self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> None:
        """Record one layer."""
        kept = {"keys": unrotated(key, self.inv_freq.to(key.device)), "values": value}
        for label in ("mean", "max"):
            kept[label] = future_labels(query, key, window=self.window, scaling=scaling, label=label)
        for name, tensor in kept.items():
            self.found[name].append(tensor.detach().to(self.dtype))

    def features(self) -> dict[str, Tensor]:
        """Stacked over layers: `[rows, layers, kv_heads, ...]`."""
        return {name: torch.stack([tensor.cpu() for tensor in found], dim=1) for name, found in self.found.items()}


def unrotated(keys: Tensor, inv_freq: Tensor) -> Tensor:
    """Keys `[.., S, head_dim]` of positions 0 .. S - 1, turned back to before RoPE."""
    return rotate(keys, -torch.arange(keys.shape[-2], device=keys.device), inv_freq)


def record(model: PreTrainedModel, tokens: Tensor, window: int) -> dict[str, Tensor]:
    """The features of blocks `[rows, S]`, in float16 on the CPU: keys and values `[rows, layers, kv_heads, S,
    head_dim]`, mean and max `[rows, layers, kv_heads, S]`."""
    use(model)
    recorder = Recorder(model, window, torch.float16)
    with torch.no_grad():
        model(input_ids=tokens.to(model.device), use_cache=False, logits_to_keep=1, dense_attention=recorder)
    return recorder.features()
