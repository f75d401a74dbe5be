"""The part that both trainings of DistillCache share: the ranker, its first weights, and its card.

`reinforce` and `supervised` say what each learns from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor

from evictbench.errors import UserError
from evictbench.models import policy_weights
from evictbench.policy.budget import PARTS, Budget
from evictbench.policy.learner import Learner, Training

from .network import Ranker
from .recipe import Recipe


class RankerLearner(Learner):
    """The ranker in training. A budget is trained as the share that it is of --length, of the tokens seen.

    fresh: whether its weights are new, so that the standardisation of its inputs is still to be set. started_from: the
    hash of the weights that it started from, for the card.
    """

    held_out: ClassVar[int] = 8

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.recipe: Recipe = training.recipe
        self.length, self.budgets = training.length, training.budgets
        if max(self.budgets) >= self.length:
            raise UserError(
                f"Texts of {self.length} tokens never fill a budget of {max(self.budgets)}: nothing would be evicted."
            )
        if self.recipe.horizon > self.length // 4:
            raise UserError(
                f"A horizon of {self.recipe.horizon} is more than a quarter of a text of {self.length} tokens: give a "
                "smaller one (--recipe horizon=...) or a larger --length."
            )
        self.ranker = Ranker()
        self.fresh = self.recipe.start is None
        self.started_from: dict[str, str] = {}
        if self.recipe.start is not None:
            start = policy_weights.load(self.recipe.start)
            if start.card["policy"] != "distillcache" or set(start.tensors) != set(self.ranker.state_dict()):
                raise UserError(f"{self.recipe.start} holds no ranker of distillcache to begin with.")
            self.ranker.load_state_dict({name: tensor.float() for name, tensor in start.tensors.items()})
            self.started_from = {"start": start.sha256}
        self.ranker.use_only(self.recipe.used)

    @property
    def device(self) -> torch.device:
        """The device of the ranker."""
        return self.ranker.shift.device

    def share(self, budget: int) -> Budget:
        """The share of the tokens seen that a budget in entries is trained as."""
        return Budget(share=max(1, round(budget / self.length * PARTS)) / PARTS)

    def export(self) -> dict[str, Tensor]:
        """The ranker's tensors, by name."""
        return {name: tensor.detach() for name, tensor in self.ranker.state_dict().items()}

    def card(self) -> Mapping[str, Any]:
        """How it was trained; weights that it started from are named by their hash."""
        shares = ", ".join(str(self.share(budget)) for budget in self.budgets)
        return {
            "settings": {**asdict(self.recipe), **{"start": None}, **self.started_from},
            "parameters": sum(parameter.numel() for parameter in self.ranker.parameters()),
            "notes": [
                *self.notes(),
                f"Budgets were shares of the tokens seen, {shares}, in texts of up to {self.length} tokens; --window "
                "plays no part, and nothing is protected.",
            ],
        }

    def notes(self) -> list[str]:
        """Sentences of the card about the method."""
        return []
