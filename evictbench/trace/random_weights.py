"""Random weights of a learned policy, for traces on a model of random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from evictbench.errors import UserError
from evictbench.models.policy_weights import Weights, variant_of
from evictbench.policy.learner import Training
from evictbench.policy.step import ModelShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from evictbench.policy.base import BasePolicy

SINKS, WINDOW = 4, 32
"""What learned policies protect by default, in training and in use."""

RANDOM = "random"
"""The origin of random weights."""


def random_weights(policy: BasePolicy, config: PretrainedConfig) -> Weights:
    """Random weights for a learned policy on a model with this config."""
    tensors = random_tensors(policy, config, ModelShape.of(config))
    return Weights(tensors, random_card(policy), RANDOM, RANDOM)


def random_tensors(policy: BasePolicy, config: PretrainedConfig, shape: ModelShape) -> dict[str, Any]:
    """The tensors that a policy's learner would save before it has learned anything; UserError if it has no learner."""
    trainable: Any = policy
    if not hasattr(policy, "learner"):
        raise UserError(
            f"{policy.name} is learned, and without weights there is nothing to trace: name some with "
            f"--weights {policy.name}=FOLDER."
        )
    training = Training(
        window=WINDOW,
        budgets=(512,),
        length=2048,
        steps=1,
        seed=0,
        recipe=trainable.Recipe() if hasattr(policy, "Recipe") else None,
        model=config.get_text_config(decoder=True),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tensors: dict[str, Any] = trainable.learner(shape, training).export()
    return tensors


def random_card(policy: BasePolicy) -> dict[str, Any]:
    """The card of such tensors."""
    settings = {"sinks": SINKS, "window": WINDOW}
    return {"policy": policy.name, "variant": variant_of(policy), "settings": settings}
