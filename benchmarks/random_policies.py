"""Policies with random weights for a model that is a shape alone, found in this checkout and not by what is installed.

What a scorer answers does not change what it costs. Every tensor that a learner would save before it has learned
anything gets noise, so that no two entries score alike; DMS gets a gate whose logits are spread like a normal
distribution's, and the calibration that follows from that.
"""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from evictbench.models.policy_weights import Weights
from evictbench.registry import POLICIES
from evictbench.trace.random_weights import RANDOM, _card, _random

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from evictbench.policy import ModelShape, Policy

NOISE = 0.1

SHARES = tuple(percent / 100 for percent in range(1, 100))
"""Shares of what has left the window, of each of which DMS's calibration has the threshold."""


def names() -> dict[str, str]:
    """Every policy of this checkout by name, as "policies.h2o:H2O"."""
    file = Path(__file__).resolve().parent.parent / "pyproject.toml"
    found = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["entry-points"][POLICIES]
    return {name: place.removeprefix("evictbench.") for name, place in found.items()}


def policy_for(name: str, config: PretrainedConfig, window: int, seed: int = 0) -> Policy:
    """A policy for a model of this config, with random weights if it learns. window: of DMS; the others have theirs."""
    from evictbench.policy import ModelShape

    module, _, kind = names()[name].partition(":")
    policy: Policy = getattr(importlib.import_module(module), kind)()
    policy.fit(config)
    shape = ModelShape.of(config)
    if not policy.learned:
        return policy
    card = _card(policy)
    if name == "dms":
        card |= {"window": window, "calibration": calibration()}
        tensors = gate(shape, seed)
    else:
        tensors = noisy(_random(policy, config, shape), seed)
    taker: Any = policy
    taker.use(Weights(tensors, card, RANDOM, RANDOM), shape)
    return policy


def noisy(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Every tensor with noise of its own."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {name: one.float() + NOISE * torch.randn(one.shape, generator=generator) for name, one in tensors.items()}


def gate(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """DMS's gate, whose logits are 100 times a draw from the standard normal distribution, if hidden states lie in any
    direction alike."""
    import torch

    assert shape.hidden_size
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((shape.layers, shape.kv_heads, shape.hidden_size), generator=generator)
    offset = 0.05  # what the gate takes off, so that half of the logits are above 0
    return {
        "weight": weight / shape.hidden_size**0.5,
        "bias": torch.full((shape.layers, shape.kv_heads), offset),
    }


def calibration() -> dict[str, list[float]]:
    """The thresholds that leave each share of such logits at or below them."""
    normal = NormalDist()
    return {"thresholds": [100 * normal.inv_cdf(share) for share in SHARES], "beyond": list(SHARES)}
