"""Weights saved and found again; those of another model, label, policy or make are refused with a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_kvpop_weights import random_tensors

from evictbench.errors import UserError
from evictbench.models import policy_weights
from evictbench.policies.kvpop import KVpop, KVpopMLP
from evictbench.policy import ModelShape, Policy

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=16)
BOTH = pytest.mark.parametrize("cls", [KVpop, KVpopMLP])


def saved(folder: Path, cls: type[Policy], label: str = "mean") -> Path:
    base = {"name": "tiny", "sha256": "abc", "shape": policy_weights.shape_data(SHAPE)}
    card = {"settings": {"sinks": 2, "window": 4}, "base_model": base, "transferable": False}
    policy_weights.save(
        folder, cls.name, cls(cls.Config(label=label)).variant, random_tensors(cls.name, SHAPE), card, half=True
    )
    return folder


def found(policy: Policy, folder: Path, shape: ModelShape = SHAPE) -> policy_weights.Weights:
    return policy_weights.find(policy, str(folder), "tiny", lambda: "abc", shape)


@BOTH
def test_saved_weights_are_found_and_set_what_is_left_open(cls: type[Policy], tmp_path: Path) -> None:
    policy = cls()
    policy.use(found(policy, saved(tmp_path, cls)), SHAPE)
    assert (policy.sinks, policy.recent(0)) == (2, 4)
    given = cls(cls.Config(sinks=1, window=9))
    given.use(found(given, tmp_path), SHAPE)
    assert (given.sinks, given.recent(0)) == (1, 9)
    assert given.minimum_budget(SHAPE) == 1 + 9 + given.charge(SHAPE).fixed + 1
    rounded = random_tensors(cls.name, SHAPE)
    for layer in range(SHAPE.layers):
        scorer, log_gamma = policy.scorer_of_layers(range(layer, layer + 1), torch.device("cpu"))  # type: ignore[attr-defined]
        heads = slice(layer * SHAPE.kv_heads, (layer + 1) * SHAPE.kv_heads)
        assert log_gamma.dtype == torch.float32
        assert log_gamma.shape == (SHAPE.kv_heads,)
        for name, tensor in scorer.state_dict().items():
            torch.testing.assert_close(tensor, rounded[name][heads], atol=1e-2, rtol=1e-3)
            assert not tensor.requires_grad


@BOTH
@pytest.mark.parametrize("other", [{"layers": 3}, {"kv_heads": 4}, {"head_dim": 32}])
def test_weights_of_another_model_are_refused(cls: type[Policy], other: dict[str, int], tmp_path: Path) -> None:
    policy, shape = cls(), replace(SHAPE, **other)
    saved(tmp_path, cls)
    with pytest.raises(UserError, match=r"another shape.*\.$"):
        found(policy, tmp_path, shape)
    # And where the card does not know better.
    with pytest.raises(UserError, match=r"\.$"):
        policy.use(found(policy, tmp_path), shape)


@BOTH
def test_weights_of_another_label_are_refused(cls: type[Policy], tmp_path: Path) -> None:
    saved(tmp_path, cls, "mean")
    with pytest.raises(UserError, match=r"mean', and '.*max' is asked for"):
        found(cls(cls.Config(label="max")), tmp_path)


def test_weights_of_the_other_policy_are_refused(tmp_path: Path) -> None:
    for cls, other in ((KVpop, KVpopMLP), (KVpopMLP, KVpop)):
        with pytest.raises(UserError, match=f"those of {other.name}, not of {cls.name}"):
            found(cls(), saved(tmp_path / other.name, other))


@BOTH
@pytest.mark.parametrize("name", ["w1", "b1", "shift", "gamma"])
def test_weights_that_lack_a_tensor_are_refused(cls: type[Policy], name: str, tmp_path: Path) -> None:
    policy = cls()
    whole = found(policy, saved(tmp_path, cls))
    tensors = {key: tensor for key, tensor in whole.tensors.items() if key != name}
    with pytest.raises(UserError, match=r"\.$"):
        policy.use(replace(whole, tensors=tensors), SHAPE)
