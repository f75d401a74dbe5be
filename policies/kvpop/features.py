"""The features that KVpop's scorers learn from, recorded in a dense pass of the frozen model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from evictbench.cache.attention import use
from evictbench.cache.rope import inverse_frequencies, rotate
from evictbench.policy.future_attention import LABELS, Label, labels_behind

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


class Recorder:
    """A `dense_attention` that only records: un-rotated keys, values and labels of every layer.

    recorded: by name, a tensor for each layer: keys and values `[rows, kv_heads, S, head_dim]`; by `label_name`
    `[rows, kv_heads, S]`, log(epsilon + attention). windows: positions behind which labels begin. dtype: of the
    records.
    """

    def __init__(
        self, model: PreTrainedModel, windows: Sequence[int], dtype: torch.dtype, labels: Sequence[Label] = LABELS
    ) -> None:
        self.inv_freq = inverse_frequencies(model, "kvpop")
        self.windows = windows
        self.labels = labels
        self.dtype = dtype
        self.recorded: dict[str, list[Tensor]] = {}

    def __call__(
        self,
        layer: int,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        normalisers: Tensor | None = None,
    ) -> None:
        """Record one layer. query `[rows, heads, S, head_dim]`, key, value `[rows, kv_heads, S, head_dim]`, rotated.
        normalisers: those of the labels, `[rows, heads, S]`; None: of full causal attention."""
        tensors = {"keys": unrotated(key, self.inv_freq.to(key.device)), "values": value}
        labels = labels_behind(
            query, key, windows=self.windows, scaling=scaling, labels=self.labels, normalisers=normalisers
        )
        tensors |= {label_name(label, window): tensor for (label, window), tensor in labels.items()}
        for name, tensor in tensors.items():
            self.recorded.setdefault(name, []).append(tensor.detach().to(self.dtype))

    def features(self) -> dict[str, Tensor]:
        """The records by name, stacked over layers: `[rows, layers, kv_heads, ...]`, on the CPU."""
        return {name: torch.stack([tensor.cpu() for tensor in layers], dim=1) for name, layers in self.recorded.items()}


def label_name(label: str, window: int) -> str:
    """The name of a label among the features: "mean-64"."""
    return f"{label}-{window}"


def unrotated(keys: Tensor, inv_freq: Tensor) -> Tensor:
    """Keys `[.., S, head_dim]` of positions 0 .. S - 1 as before RoPE. inv_freq: the inverse rotary frequencies."""
    return rotate(keys, -torch.arange(keys.shape[-2], device=keys.device), inv_freq)


def record(model: PreTrainedModel, tokens: Tensor, windows: Sequence[int]) -> dict[str, Tensor]:
    """The features of blocks of tokens `[rows, S]`, in float16 on the CPU: keys and values `[rows, layers, kv_heads, S,
    head_dim]`, labels `[rows, layers, kv_heads, S]`. windows: positions behind which labels begin."""
    use(model)
    recorder = Recorder(model, windows, torch.float16)
    with torch.no_grad():
        model(input_ids=tokens.to(model.device), use_cache=False, logits_to_keep=1, dense_attention=recorder)
    return recorder.features()
