"""What share of a cache DMS keeps at which threshold, measured by hard decisions in sparse passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evictbench.cache.hooks import tapped
from evictbench.policy.learner import Visible
from evictbench.train.distillation import before_head, distance
from evictbench.train.sparse_attention import attend_visible

from . import gate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLOSED = (0.05, 0.15, 0.3, 0.45, 0.6, 0.7, 0.78, 0.84, 0.88, 0.91, 0.94, 0.97)
"""Shares of the tokens beyond the window that are closed at the thresholds tried, in a dense pass."""


@torch.no_grad()
def measured(
    model: PreTrainedModel, separate: gate.SeparateGate, blocks: Sequence[Tensor], *, sinks: int, window: int
) -> dict[str, Any]:
    """A table from loose to tight: `thresholds`, and what each came to, means over blocks `[1, tokens]`, layers, heads.

    `shares`: entries that a query sees of those it has seen, over the queries of each block's second half;
    `beyond`: the share kept of the tokens that have left the window, which does not depend on length; `kl`: nats a
    token from the dense model, over the second half. length: tokens of a block, at most.
    """
    decided = [_Decided(model, separate, tokens, sinks, window) for tokens in blocks]
    ordered = torch.cat([z for text in decided for z in text.dense]).sort(descending=True).values
    thresholds = [round(float(ordered[int(closed * len(ordered))]), 4) for closed in CLOSED]
    rows = [torch.tensor([text.at(threshold) for text in decided]).mean(0).tolist() for threshold in thresholds]
    return {
        "length": max(tokens.shape[1] for tokens in blocks),
        "blocks": len(blocks),
        "thresholds": thresholds,
        "shares": [round(row[0], 5) for row in rows],
        "beyond": [round(row[1], 5) for row in rows],
        "kl": [round(row[2], 6) for row in rows],
    }


class _Decided:
    """One text under a gate. dense: the logits of its tokens beyond the window in a dense pass, one tensor a layer."""

    def __init__(
        self, model: PreTrainedModel, separate: gate.SeparateGate, tokens: Tensor, sinks: int, window: int
    ) -> None:
        self.model, self.separate, self.tokens, self.sinks, self.window = model, separate, tokens, sinks, window
        self.half = tokens.shape[1] // 2
        self.dense: list[Tensor] = []
        with tapped(model, {"residual"}, lambda layer, name, hidden: self.dense.append(self._beyond(layer, hidden))):
            self.teacher = before_head(model, tokens)[:, self.half :]

    def at(self, threshold: float) -> tuple[float, float, float]:
        """The share seen, the share kept beyond the window, and the divergence, deciding by this threshold."""
        inputs: dict[int, Tensor] = {}
        seen: list[Tensor] = []
        beyond: list[Tensor] = []
        length = self.tokens.shape[1]

        def take(layer: int, name: str, hidden: Tensor) -> None:
            inputs[layer] = hidden

        def attend(layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            evicted = gate.governing(self.separate.logits(layer, inputs.pop(layer))) > threshold
            positions = torch.arange(length, device=evicted.device)
            evicted &= positions >= self.sinks
            deadlines = torch.where(evicted, positions + self.window + 1, length + 1).to(query.device)
            gone = torch.zeros_like(positions, dtype=torch.float32)
            gone[self.window + 1 :] = evicted.float().mean((0, 1)).cumsum(0)[: length - self.window - 1]
            seen.append((1 - gone / (positions + 1))[self.half :].mean().cpu())
            beyond.append(1 - evicted[..., self.sinks : length - 1 - self.window].float().mean().cpu())
            return attend_visible(query, key, value, Visible(deadlines), scaling)

        with tapped(self.model, {"residual"}, take):
            student = before_head(self.model, self.tokens, dense_attention=attend)[:, self.half :]
        kl = distance(self.model, self.teacher, student, "forward")
        return float(torch.stack(seen).mean()), float(torch.stack(beyond).mean()), float(kl)

    def _beyond(self, layer: int, hidden: Tensor) -> Tensor:
        z = gate.governing(self.separate.logits(layer, hidden))
        return z[..., self.sinks : hidden.shape[1] - 1 - self.window].flatten().cpu()
