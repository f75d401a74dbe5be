"""StreamingLLM+: the model is fine-tuned to live with sinks and a window; nothing else is learned.

Hauzenberger et al. (arXiv 2607.05061) train it as the control of their learned policies, to see what fine-tuning alone
recovers. The sparse pass sees what the policy keeps at the budget drawn, the sinks where its `positions` setting puts
them; the paper does not say which setting it used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from evictbench.cache.rope import inverse_frequencies
from evictbench.errors import UserError
from evictbench.policy import NEVER
from evictbench.policy.learner import Batch, Learner, Training, Visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel


class StreamingLearner(Learner):
    """A learner of the model alone, without a scorer. reindexed: the sinks are seen at their in-cache distance."""

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
        """Read the rotary frequencies; raises UserError where sinks cannot be moved on this model."""
        if self.reindexed:
            self._inv_freq = inverse_frequencies(model, "streaming_llm")

    def attention(self, batch: Batch) -> SinksAndWindow:
        """The sparse pass at the batch's budget."""
        return SinksAndWindow(self.sinks, batch.budget, self._inv_freq)


class SinksAndWindow:
    """A pass that sees the first `sinks` keys and the last `budget - sinks`, the query's own included."""

    def __init__(self, sinks: int, budget: int, inv_freq: Tensor | None) -> None:
        self.sinks, self.budget, self.inv_freq = sinks, budget, inv_freq

    def visible(self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Visible:
        """The keys that each query sees, which are the same in every layer."""
        positions = torch.arange(key.shape[2], device=key.device)
        expiry = (positions + self.budget - self.sinks).masked_fill(positions < self.sinks, NEVER)
        visible = Visible(expiry.expand(key.shape[0], 1, -1))
        if self.inv_freq is not None:
            visible.sinks, visible.inv_freq = self.sinks, self.inv_freq.to(key.device)
            visible.shift = (positions - (self.budget - 1)).clamp(min=0)
        return visible

    def features(self) -> None:
        """None: there is no scorer to learn from the pass."""
        return None
