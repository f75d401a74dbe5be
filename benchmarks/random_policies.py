"""Policies with random weights for a model that is a shape alone, found in this checkout and not by what is installed.

The answers of a scorer do not change what it costs. Every tensor that a learner would save before it has learned
anything gets noise, so that no two entries score alike; DMS gets a gate whose logits are spread like a normal
distribution's, and the calibration that follows from that.
"""

from __future__ import annotations

import importlib
import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

from evictbench.models.policy_weights import Weights
from evictbench.models.ready import ready_policy
from evictbench.policy import ModelShape, PagedPolicy
from evictbench.registry import POLICIES
from evictbench.trace.random_weights import random_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PretrainedConfig

    from evictbench.policy import BasePolicy

NOISE = 0.1

SHARES = tuple(percent / 100 for percent in range(1, 100))
"""Shares of what has left the window; DMS's calibration has a threshold for each."""


def names() -> dict[str, str]:
    """Every policy of this checkout by name, as "policies.h2o:H2O"."""
    file = Path(__file__).resolve().parent.parent / "pyproject.toml"
    entry_points = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["entry-points"][POLICIES]
    return {name: target.removeprefix("evictbench.") for name, target in entry_points.items()}


def policy_for(name: str, config: PretrainedConfig, window: int, seed: int = 0) -> BasePolicy:
    """A policy for a model of this config, with random weights if it learns.

    window: of DMS; the others have their own.
    """
    module, _, class_name = names()[name].partition(":")
    policy: BasePolicy = getattr(importlib.import_module(module), class_name)()
    if isinstance(policy, PagedPolicy):
        policy.fit(config)
    weights: Weights | None = None
    if policy.learned:
        weights = random_weights(policy, config)
        if name == "dms":
            card = {**weights.card, "window": window, "calibration": calibration()}
            weights = replace(weights, tensors=gate(ModelShape.of(config), seed), card=card)
        else:
            weights = replace(weights, tensors=noisy(weights.tensors, seed))
    return ready_policy(policy, config, weights=weights).policy


def noisy(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Every tensor with noise of its own."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    noise = {name: NOISE * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    return {name: tensor.float() + noise[name] for name, tensor in tensors.items()}


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
