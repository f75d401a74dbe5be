"""What the tests of DistillCache's training share: texts, learners and batches on a tiny model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evictbench.policies.distillcache import DistillCache
from evictbench.policies.distillcache.recipe import Recipe
from evictbench.policies.distillcache.reinforce import ReinforceLearner
from evictbench.policies.distillcache.subset import gumbel_top
from evictbench.policies.distillcache.supervised import SupervisedLearner
from evictbench.policy import ModelShape
from evictbench.policy.budget import Budget
from evictbench.policy.learner import Batch, Learner, Training

LENGTH, PROMPT, STEPS = 72, 50, 12
SHARE = Budget(share=0.6)


def text(seed: int = 0, length: int = LENGTH) -> list[int]:
    found: list[int] = torch.randint(97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def training(model: Any, budgets: tuple[int, ...] = (43,), length: int = LENGTH, **recipe: Any) -> Training:
    chosen = Recipe(**{"horizon": STEPS, "samples": 3} | recipe)
    config: Any = getattr(model, "config", None)
    return Training(window=8, budgets=budgets, length=length, steps=10, seed=0, recipe=chosen, model=config)


def learner_for(training: Training) -> Learner:
    return DistillCache().learner(ModelShape(2, 4, 2, 16), training)


def reinforced(model: Any = None, **recipe: Any) -> ReinforceLearner:
    torch.manual_seed(0)
    learner = learner_for(training(model, **recipe))
    assert isinstance(learner, ReinforceLearner)
    return learner


def supervised(model: Any, **recipe: Any) -> SupervisedLearner:
    torch.manual_seed(0)
    learner = learner_for(training(model, method="supervised", every=3, **recipe))
    assert isinstance(learner, SupervisedLearner)
    return learner


def batch(model: Any, rows: int = 1, seed: int = 0) -> Batch:
    return Batch(
        tokens=torch.tensor([text(seed + row) for row in range(rows)]),
        step=0,
        steps=10,
        budget=43,
        window=8,
        generator=torch.Generator().manual_seed(seed),
        model=model,
    )


def drawing(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda moment: gumbel_top(torch.zeros(moment.rows, moment.positions.shape[-1]), moment.size, generator)


def probabilities(model: Any, tokens: list[int]) -> Tensor:
    """Of plain causal attention, `[layers, heads, tokens, tokens]`."""
    found = []

    def attend(layer: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        found.append((query @ key.mT * scaling).masked_fill(~causal, -torch.inf).softmax(-1)[0])

    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False, dense_attention=attend)
    return torch.stack(found)
