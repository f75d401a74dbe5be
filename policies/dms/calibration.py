"""The share of the cache that DMS keeps at each threshold, measured by hard decisions in sparse passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evictbench.cache.hooks import hooked
from evictbench.policy.learner import Visible
from evictbench.train.distillation import divergence, last_hidden_state
from evictbench.train.sparse_attention import attend_visible

from . import gate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLOSED_SHARES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.7, 0.78, 0.84, 0.88, 0.91, 0.94, 0.97)
"""The shares of the tokens beyond the window that the tried thresholds evict in a dense pass."""


@torch.no_grad()
def calibration_table(
    model: PreTrainedModel, separate: gate.SeparateGate, blocks: Sequence[Tensor], *, sinks: int, window: int
) -> dict[str, Any]:
    """A table of `thresholds`, loosest first, and what each keeps: means over blocks `[1, tokens]`, layers and heads.

    shares: the share of the entries before a query that it sees, for queries of each block's second half. beyond: the
    share kept of the tokens that have left the window, which does not depend on length. kl: nats a token from the dense
    model, over the second half. length: tokens of the longest block. separate: the gate. sinks, window: as in `DMS`.
    """
    texts = [_GatedText(model, separate, tokens, sinks, window) for tokens in blocks]
    ordered = torch.cat([z for text in texts for z in text.dense]).sort(descending=True).values
    thresholds = [round(float(ordered[int(closed * len(ordered))]), 4) for closed in CLOSED_SHARES]
    rows = [torch.tensor([text.measured(threshold) for text in texts]).mean(0).tolist() for threshold in thresholds]
    return {
        "length": max(tokens.shape[1] for tokens in blocks),
        "blocks": len(blocks),
        "thresholds": thresholds,
        "shares": [round(row[0], 5) for row in rows],
        "beyond": [round(row[1], 5) for row in rows],
        "kl": [round(row[2], 6) for row in rows],
    }


class _GatedText:
    """One text `[1, tokens]` under a gate. dense: each layer's logits of tokens beyond the window, in a dense pass."""

    def __init__(
        self, model: PreTrainedModel, separate: gate.SeparateGate, tokens: Tensor, sinks: int, window: int
    ) -> None:
        self.model, self.separate, self.tokens, self.sinks, self.window = model, separate, tokens, sinks, window
        self.half = tokens.shape[1] // 2
        self.dense: list[Tensor] = []
        with hooked(model, {"residual"}, lambda layer, name, hidden: self.dense.append(self._beyond(layer, hidden))):
            self.teacher = last_hidden_state(model, tokens)[:, self.half :]

    def measured(self, threshold: float) -> tuple[float, float, float]:
        """The share seen, the share kept beyond the window, and the divergence, with this threshold."""
        inputs: dict[int, Tensor] = {}
        seen: list[Tensor] = []
        beyond: list[Tensor] = []
        length = self.tokens.shape[1]

        def keep_input(layer: int, name: str, hidden: Tensor) -> None:
            inputs[layer] = hidden

        def attend(layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            evicted = gate.governing(self.separate.logits(layer, inputs.pop(layer))) > threshold
            positions = torch.arange(length, device=evicted.device)
            evicted &= positions >= self.sinks
            expiry = torch.where(evicted, positions + self.window + 1, length + 1).to(query.device)
            gone = torch.zeros_like(positions, dtype=torch.float32)
            gone[self.window + 1 :] = evicted.float().mean((0, 1)).cumsum(0)[: length - self.window - 1]
            seen.append((1 - gone / (positions + 1))[self.half :].mean().cpu())
            beyond.append(1 - evicted[..., self.sinks : length - 1 - self.window].float().mean().cpu())
            return attend_visible(query, key, value, Visible(expiry), scaling)

        with hooked(self.model, {"residual"}, keep_input):
            student = last_hidden_state(self.model, self.tokens, dense_attention=attend)[:, self.half :]
        kl = divergence(self.model, self.teacher, student, "forward")
        return float(torch.stack(seen).mean()), float(torch.stack(beyond).mean()), float(kl)

    def _beyond(self, layer: int, hidden: Tensor) -> Tensor:
        z = gate.governing(self.separate.logits(layer, hidden))
        return z[..., self.sinks : hidden.shape[1] - 1 - self.window].flatten().cpu()
