"""StreamingLLM: attention sinks and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from evictbench.errors import UserError
from evictbench.policy import ModelShape, Policy, Step
from evictbench.policy.plot_style import PlotStyle

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy.learner import Learner, Training


@dataclass(frozen=True)
class Settings:
    """sinks: first tokens, never evicted. positions: "reindexed" as published, or "original" (kvpress and others)."""

    sinks: int = 4
    positions: Literal["reindexed", "original"] = "reindexed"

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise UserError(f"streaming_llm: sinks must be 0 or more, not {self.sinks}.")
        if self.positions not in ("reindexed", "original"):
            raise UserError(f"streaming_llm: positions is reindexed or original, not {self.positions!r}.")


class StreamingLLM(Policy):
    """Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453, section 3.2.

    The first `sinks` positions and the last `budget - sinks` are kept, the query's own included, in every layer and
    head alike. Positions are those inside the cache: a recent key keeps its true distance to the query, and sink j is
    seen at distance min(q, budget - 1) - j.

    Deviation: the paper streams token by token; here a prompt is fed in chunks, with expiries that give the same
    hidden states for any chunk size.
    """

    name = "streaming_llm"
    summary = "attention sinks and the most recent tokens"
    paper = "arXiv 2309.17453"
    plot_style = PlotStyle("#5e9cc4", "s", place=3)
    Config = Settings
    granularity = "model"
    prefill = "bounded"
    static = True

    @property
    def sinks(self) -> int:
        """How many first positions are never evicted."""
        return int(self.config.sinks)

    @property
    def reindexed_sinks(self) -> bool:
        """Whether the sinks are seen at their distance in the cache; positions=original leaves them as they are."""
        return bool(self.config.positions == "reindexed") and self.sinks > 0

    def learner(self, shape: ModelShape, training: Training) -> Learner:
        """The trainable side, StreamingLLM+: `evictbench train --finetune` trains the model alone."""
        from .learner import StreamingLearner

        return StreamingLearner(self.sinks, self.reindexed_sinks, training)

    def score(self, step: Step) -> Tensor:
        """The positions, `[rows, 1, slots]`: the most recent entries are kept."""
        return step.positions

    def expiry(self, step: Step) -> Tensor:
        """The first query that no longer sees each entry. Query q sees positions after q - (budget - sinks)."""
        import torch

        from evictbench.policy import NEVER

        following = step.query_positions[:, -1:] + 1
        queries = torch.cat([step.query_positions, following], dim=1).long()
        last_gone = (queries - (step.budgets - self.sinks)).masked_fill(queries < 0, -NEVER)
        positions = step.positions.long()
        index = torch.searchsorted(
            last_gone[:, None].expand(-1, positions.shape[1], -1).contiguous(), positions.contiguous()
        )
        beyond = index == queries.shape[1]
        expiry = queries[:, None].expand(-1, positions.shape[1], -1).gather(-1, index.masked_fill(beyond, 0))
        return expiry.masked_fill(beyond | (positions < self.sinks), NEVER).to(torch.int32)
