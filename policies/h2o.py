"""H2O: heavy hitters by accumulated attention, and the most recent tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.policy import GROUP_DIM, Granularity, GroupReduction, ModelShape, Policy, SlotTensor, Step
from evictbench.policy.plot_style import PlotStyle

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """group: how the scores of the query heads of one KV head are reduced; the paper's models have one query head per
    KV head. shares: who shares one kept set: a KV "head", as published, or, as a control, a "layer" or the "model"."""

    group: GroupReduction = "mean"
    shares: Granularity = "head"

    def __post_init__(self) -> None:
        if self.group not in ("mean", "max", "sum"):
            raise UserError(f"h2o: group is mean, max or sum, not {self.group!r}.")
        if self.shares not in ("head", "layer", "model"):
            raise UserError(f"h2o: shares is head, layer, model, not {self.shares!r}.")


class H2O(Policy):
    """Zhang et al., "H2O: Heavy-Hitter Oracle", arXiv 2306.14048, algorithm 1, as in the authors' real-drop code.

    Half of the budget (rounded down) goes to the most recent tokens, the next query's own included. The rest goes to
    the tokens with the largest attention, accumulated over every query since they entered. Each KV head has its own
    kept set. The prompt is attended to whole and cut once at its end.

    Deviations: the authors' halves do not count the next query's own entry, so that with equal halves one recent entry
    more stays and one heavy hitter less. Their code supports one query head per KV head only; under GQA the sums of a
    group are reduced by `group`. Keys keep their original positions (the authors' "streaming" variant re-indexes them).

    shares=layer and shares=model are controls and not the published method. They compare with methods that keep one set
    for a layer or for the model: the scores of all KV heads that share the set, each reduced over its group, are added.
    """

    name = "h2o"
    summary = "accumulated attention, half of the budget recent"
    paper = "arXiv 2306.14048"
    plot_style = PlotStyle("#ec8207", "o", place=5)
    Config = Settings
    signals = frozenset({"mass"})

    def __init__(self, config: Settings | None = None) -> None:
        super().__init__(config)
        self.granularity = self.config.shares

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """Half of the budget, rounded down. budget: entries, an int or a tensor of any shape."""
        return budget // 2

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """`mass`, the accumulated attention of each entry: per query head with group=max, else per KV head."""
        import torch

        if self.granularity != "head" and self.config.group != "max":
            return {}
        return {"mass": SlotTensor(torch.float32, width=shape.group if self.config.group == "max" else 0)}

    def shared_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """`mass`, the sum over all KV heads that share a kept set."""
        import torch

        return {} if self.granularity == "head" else {"mass": SlotTensor(torch.float32)}

    def observe(self, step: Step) -> None:
        """Add the attention that each entry got from the queries of this pass."""
        mass = step.signals.mass
        assert mass is not None
        if self.config.group == "max":
            step.state["mass"].add_(mass.transpose(2, 3))
            if self.granularity == "head":
                return
            if self.granularity == "layer" or step.layer == 0:
                step.shared["mass"].zero_()
            mass, weight = step.state["mass"].amax(-1), 1.0
        else:
            weight = 1 / step.shape.group if self.config.group == "mean" else 1
            mass = mass.sum(GROUP_DIM)
        if self.granularity == "head":
            step.state["mass"].add_(mass, alpha=weight)
        else:
            total = step.shared["mass"]
            total.add_(mass.sum(1, keepdim=True).to(total.device), alpha=weight)

    def score(self, step: Step) -> Tensor:
        """The accumulated attention, `[rows, sets, slots]`."""
        if self.granularity != "head":
            return step.shared["mass"].to(step.positions.device)
        mass = step.state["mass"]
        return mass.amax(-1) if self.config.group == "max" else mass
