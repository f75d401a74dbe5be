"""StreamingLLM+: the model fine-tuned to live with sinks and a window, with nothing else learned.

Hauzenberger et al. (arXiv 2607.05061) train it as the control of their learned policies: what fine-tuning alone gives
back. The sparse pass sees what the policy keeps at every budget drawn, the sinks where its `positions` setting puts
them; the paper does not say which it used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from evictbench.cache.rope import inverse_frequencies
from evictbench.errors import UserError
from evictbench.policy.deadlines import NEVER
from evictbench.policy.learner import Batch, Learner, Training, Visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel


class StreamingLearner(Learner):
    """No scorer: only the model is trained. reindexed: the sinks are seen at their in-cache distance."""

    finetune_only = True

    def __init__(self, sinks: int, reindexed: bool, training: Training) -> None:
        super().__init__()
        if min(training.budgets) <= sinks:
            raise UserError(f"A budget of {min(training.budgets)} entries has no room beside {sinks} sinks.")
        if min(training.budgets) >= training.length:
            raise UserError(
                f"Blocks of {training.length} tokens never fill a budget of {min(training.budgets)}: nothing is hidden."
            )
        self.sinks = sinks
        self.reindexed = reindexed
        self._inv_freq: Tensor | None = None

    def begin(self, model: PreTrainedModel, blocks: Sequence[Tensor]) -> None:
        """Take the rotary frequencies; UserError where sinks cannot be moved on this model."""
        if self.reindexed:
            self._inv_freq = inverse_frequencies(model, "streaming_llm")

    def attention(self, batch: Batch) -> SinksAndWindow:
        """One pass at the batch's budget."""
        return SinksAndWindow(self.sinks, batch.budget, self._inv_freq)


class SinksAndWindow:
    """What every layer sees: the first `sinks` keys and the last `budget - sinks`, the query's own included."""

    def __init__(self, sinks: int, budget: int, inv_freq: Tensor | None) -> None:
        self.sinks, self.budget, self.inv_freq = sinks, budget, inv_freq

    def visible(self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Visible:
        """The same in every layer."""
        positions = torch.arange(key.shape[2], device=key.device)
        deadlines = (positions + self.budget - self.sinks).masked_fill(positions < self.sinks, NEVER)
        shown = Visible(deadlines.expand(key.shape[0], 1, -1))
        if self.inv_freq is not None:
            shown.sinks, shown.inv_freq = self.sinks, self.inv_freq.to(key.device)
            shown.shift = (positions - (self.budget - 1)).clamp(min=0)
        return shown

    def features(self) -> None:
        """Nothing is learned from it."""
        return None
