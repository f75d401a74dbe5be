"""DistillCache with the random ranker of its twin."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from evictbench.models.policy_weights import Weights, shape_data
from evictbench.policies.distillcache import DistillCache
from evictbench.policy import ModelShape
from evictbench.policy.charge import Charge
from twin.cases import Case
from twin.distillcache import Ranker

SHAPE = ModelShape(2, 4, 2, 16)


def tensors(ranker: Ranker) -> dict[str, Tensor]:
    """The twin's ranker by the names that the policy's weights have."""
    found = {"shift": ranker.shift, "scale": ranker.scale}
    for number, (matrix, bias, weight, shift) in enumerate(ranker.hidden):
        linear, norm = 3 * number, 3 * number + 1
        found |= {f"layers.{linear}.weight": matrix, f"layers.{linear}.bias": bias}
        found |= {f"layers.{norm}.weight": weight, f"layers.{norm}.bias": shift}
    return found | {"layers.6.weight": ranker.last[None], "layers.6.bias": ranker.bias[None]}


def weights(ranker: Ranker, policy: str = "distillcache", shape: ModelShape = SHAPE) -> Weights:
    """As `evictbench.models.policy_weights` would load them."""
    card = {"policy": policy, "variant": "", "transferable": True, "settings": {}}
    card["base_model"] = {"name": "tiny", "sha256": "0", "shape": shape_data(shape)}
    return Weights({name: tensor.float() for name, tensor in tensors(ranker).items()}, card, "random", "0")


def policy_of(case: Case, cls: type[DistillCache] = DistillCache) -> DistillCache:
    """The policy of a twin's case, with the twin's weights. Its ring is not charged: on a model so small it would cost
    as much as the entries, where on a real one it costs none."""
    rule: Any = case.rule
    policy = cls(cls.Config(**case.settings))
    policy.use(weights(rule.ranker), ModelShape.of(case.model().config))
    policy.charge = lambda shape: Charge()  # type: ignore[method-assign]
    return policy
