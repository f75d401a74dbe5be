"""KVpop with random weights, the same in the policy and in its twin."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from evictbench.models.policy_weights import Weights, shape_data
from evictbench.policy import ModelShape, Policy
from twin.kvpop import random_weights, tensors


def random_tensors(name: str, shape: ModelShape, seed: int = 0, normed: bool = False) -> dict[str, Tensor]:
    """What a trained scorer would save, layers and KV heads in one dimension. normed: with a head norm."""
    by_layer = random_weights(seed, shape.layers, shape.kv_heads, shape.head_dim, name == "kvpop", normed)
    heads = [head for layer in by_layer for head in layer]
    low, high = math.log(0.999), math.log(0.999999)
    share = (torch.stack([head.log_gamma for head in heads]) - low) / (high - low)
    return {name: tensor.float() for name, tensor in tensors(heads).items()} | {"gamma": share.logit().float()}


def random_fit(
    policy: Policy, model: Any, seed: int = 0, *, waits_for_recent: bool = False, normed: bool = False
) -> Policy:
    """The policy, with weights for this model. waits_for_recent: they were trained to be read behind the recent
    share."""
    shape = ModelShape.of(model.config)
    card = {
        "policy": policy.name,
        "variant": policy.variant,
        "settings": {"counted_from": "protected"} if waits_for_recent else {},
        "base_model": {"name": "tiny", "sha256": "0", "shape": shape_data(shape)},
    }
    policy.use(Weights(random_tensors(policy.name, shape, seed, normed), card, "random", "0"), shape)
    return policy
