"""How a layer turns the products of queries and keys into probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Softmax:
    """Softmax attention of one layer.

    scaling: factor of the products. softcap: a product x becomes softcap * tanh(x / softcap) (Gemma 2). sinks:
    `[heads]`, one more logit of each query head, whose probability goes to no entry (gpt-oss).
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """The softmax of the scaled products, as torch's own kernels compute it."""
        return self.softcap is None and self.sinks is None

    def capped(self, logits: Tensor) -> Tensor:
        """Scaled products, capped; before any mask is added."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities of capped and masked logits `[rows, kv_heads, group, ..., slots]`, float32 or wider."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        if self.sinks is None:
            return logits.softmax(-1, dtype=wide)
        sinks = self.sinks.to(logits.device).view(1, *logits.shape[1:3], *[1] * (logits.dim() - 3))
        sinks = sinks.to(logits.dtype).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sinks], dim=-1).softmax(-1, dtype=wide)[..., :-1]
