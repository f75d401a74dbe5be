"""The settings of DistillCache's training (`evictbench train --policy distillcache --recipe method=supervised`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evictbench.errors import UserError

NAMES = ("alpha", "norm", "sigma", "entropy", "place")
"""The features of an entry, in their order; `DistillCache` defines them."""


@dataclass(frozen=True)
class Recipe:
    """How the ranker is trained. Budgets are shares: --budget in relation to --length is the share of the tokens seen
    that is kept. --window is not used.

    method: "reinforce", by the divergence that its choices cause; "supervised", by what the dense run attends to later.
    start: a folder of weights to start from; None: new ones. horizon: tokens of a text after its prompt, one decision
    each. gamma: the discount of later rewards and of later attention.

    For reinforce. samples: rows of one text that each draw their sets. temperature: divides the scores when sets are
    drawn. sampler: "gumbel", as published, or "poisson", which draws from the distribution whose log-probability has
    the gradient. entropy: the weight of a choice's surprise. bonus: what a choice's surprise is, "sum", minus the
    log-probability of its whole set, as published, or "mean", the same per entry that the choice evicts. reward: "kl",
    as published, or "attention", the share of the teacher's attention of the next 8 tokens that the choice keeps.
    average: the share that the moving average of returns keeps at each update. normalise: divide advantages by their
    spread over a text's samples and choices, which is not in the paper.

    For supervised. target: "importance", the regression of the logarithm of later attention, or "set", the likelihood
    of the teacher's best set. cuts: prompts cut from each text. every: steps between two decisions that are used.

    features: "all", or the names of those that the ranker may use, joined by plus signs: "alpha+entropy". The others'
    weights are 0 and stay so.
    """

    method: Literal["reinforce", "supervised"] = "reinforce"
    start: str | None = None
    horizon: int = 32
    samples: int = 8
    temperature: float = 1.0
    sampler: Literal["gumbel", "poisson"] = "gumbel"
    gamma: float = 0.99
    entropy: float = 0.01
    bonus: Literal["sum", "mean"] = "sum"
    reward: Literal["kl", "attention"] = "kl"
    average: float = 0.99
    normalise: bool = False
    target: Literal["importance", "set"] = "importance"
    cuts: int = 2
    every: int = 8
    features: str = "all"

    def __post_init__(self) -> None:
        least = {"horizon": 1, "samples": 1, "cuts": 1, "every": 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise UserError(f"distillcache trains with {name} of {number} or more, not {getattr(self, name)}.")
        if not 0 <= self.gamma <= 1 or not 0 <= self.average < 1 or self.entropy < 0 or self.temperature <= 0:
            raise UserError(
                "distillcache trains with a gamma of 0 to 1, an average from 0 to below 1, an entropy of 0 or more "
                "and a temperature above 0."
            )
        unknown = set(self.used) - set(NAMES)
        if unknown or len(self.used) != len(set(self.used)):
            raise UserError(
                f"distillcache ranks by {', '.join(NAMES)}: name some, each once, joined by plus signs, or all "
                f"(--recipe features=alpha+entropy), and not {self.features!r}."
            )
        if self.start is not None and not Path(self.start).expanduser().is_dir():
            raise UserError(f"There is no folder {self.start} to begin with (--recipe start=...).")

    @property
    def used(self) -> tuple[str, ...]:
        """The names of the features that the ranker may use."""
        return NAMES if self.features == "all" else tuple(self.features.split("+"))
