"""H2O: heavy hitters by accumulated attention, and the most recent tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.policy import GROUP_DIM, GroupReduction, ModelShape, Policy, SlotTensor, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """group: how the query heads of one KV head are reduced; the paper's models have one query head per KV head."""

    group: GroupReduction = "mean"

    def __post_init__(self) -> None:
        if self.group not in ("mean", "max", "sum"):
            raise UserError(f"h2o: group is mean, max or sum, not {self.group!r}.")


class H2O(Policy):
    """Zhang et al., "H2O: Heavy-Hitter Oracle", arXiv 2306.14048, algorithm 1, as in the authors' real-drop code.

    Half of the budget (rounded down) is the most recent tokens, the next query's own included; the rest are the
    tokens with the largest attention accumulated over every query seen since they entered. One set per KV head.
    The prompt is attended whole and cut once at its end.

    Deviations: the authors' code supports one query head per KV head only; under GQA the sums of a group are reduced
    by `group`. Keys keep their original positions (the authors' "streaming" variant re-indexes them).
    """

    name = "h2o"
    summary = "accumulated attention, half of the budget recent"
    paper = "arXiv 2306.14048"
    Config = Settings
    signals = frozenset({"mass"})

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """Half of the budget."""
        return budget // 2

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """The running sum: per KV head where the reduction is linear, else per query head."""
        import torch

        return {"mass": SlotTensor(torch.float32, width=shape.group if self.config.group == "max" else 0)}

    def observe(self, step: Step) -> None:
        """Add this pass's column sums."""
        mass = step.signals.mass
        assert mass is not None
        if self.config.group == "max":
            step.state["mass"].add_(mass.transpose(2, 3))
        else:
            share = 1 / step.shape.group if self.config.group == "mean" else 1
            step.state["mass"].add_(mass.sum(GROUP_DIM), alpha=share)

    def score(self, step: Step) -> Tensor:
        """The accumulated attention, `[rows, kv_heads, slots]`."""
        mass = step.state["mass"]
        return mass.amax(-1) if self.config.group == "max" else mass
