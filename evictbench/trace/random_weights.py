"""What a learned policy scores with in a trace: its weights, or on a model that is a shape alone, random ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.models import policy_weights
from evictbench.policy.step import ModelShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from evictbench.models.load import Source
    from evictbench.policy.base import Policy
    from evictbench.registry import ChosenPolicy

SINKS, WINDOW = 4, 32
"""What learned policies protect by default, in training as in use."""

RANDOM = "random"


def equip(
    chosen: ChosenPolicy, where: str | None, source: Source | None, model: str, config: PretrainedConfig
) -> tuple[Policy, str | None]:
    """The policy with what it scores by, and what that is, in words; None for a policy that has nothing to learn.

    where: as `--weights` names them. source: None for a shape.
    """
    policy: Policy = chosen.policy(chosen.config)
    policy.fit(config)
    shape = ModelShape.of(config)
    if not policy.learned:
        if where is not None:
            raise UserError(f"{policy.name} is not learned and takes no weights: leave out {where}.")
        return policy, None
    taker: Any = policy
    if source is not None:
        return policy, str(policy_weights.equip(policy, where, source, model, shape))
    if where is not None:
        found = policy_weights.find(policy, where, model, model, shape)
        taker.use(found, shape)
        return policy, str(found)
    taker.use(policy_weights.Weights(_random(policy, config, shape), _card(policy), RANDOM, RANDOM), shape)
    return policy, RANDOM


def _random(policy: Policy, config: PretrainedConfig, shape: ModelShape) -> dict[str, Any]:
    """What a learner that has learned nothing would save."""
    import torch

    from evictbench.policy.learner import Training

    pupil: Any = policy
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
        recipe=pupil.Recipe() if hasattr(policy, "Recipe") else None,
        model=config.get_text_config(decoder=True),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tensors: dict[str, Any] = pupil.learner(shape, training).export()
    return tensors


def _card(policy: Policy) -> dict[str, Any]:
    settings = {"sinks": SINKS, "window": WINDOW}
    return {"policy": policy.name, "variant": policy_weights.variant_of(policy), "settings": settings}
