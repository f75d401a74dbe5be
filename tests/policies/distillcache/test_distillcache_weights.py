"""DistillCache's weights: saved, found, refused with a sentence where they are of another kind, and taken by other
models, which their results say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugin_fixtures import installed
from random_distillcache_weights import SHAPE, tensors
from torch import Tensor

from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.evaluation import plan
from evictbench.evaluation.settings import RunSettings
from evictbench.models import policy_weights
from evictbench.policies.distillcache import DistillCache
from evictbench.policies.kvpop import KVpop
from evictbench.policy import ModelShape
from twin.distillcache import random_ranker
from twin.tiny import random_tokens, tiny_model

__all__ = ["installed"]


def saved(folder: Path, changes: Callable[[dict[str, Tensor]], Any] = lambda tensors: None, **card: Any) -> Path:
    """A folder of weights with the random ranker, after `changes` to its tensors."""
    found = {name: tensor.float() for name, tensor in tensors(random_ranker(0)).items()}
    changes(found)
    base = {"name": "first", "sha256": "abc", "shape": policy_weights.shape_data(SHAPE)}
    policy_weights.save(
        folder, "distillcache", "", found, {"settings": {}, "base_model": base, "transferable": True} | card
    )
    return folder


def found(folder: Path, shape: ModelShape = SHAPE, sha256: str = "abc") -> policy_weights.Weights:
    return policy_weights.find(DistillCache(), str(folder), "second", lambda: sha256, shape)


def test_saved_weights_rank_as_they_did(tmp_path: Path) -> None:
    policy = DistillCache()
    policy.use(found(saved(tmp_path)), SHAPE)
    cache = new_cache(tiny_model(), policy, 12)
    tiny_model()(input_ids=torch.tensor([random_tokens(30)]), past_key_values=cache)
    assert cache.kept(0).shape == (1, 11)


@pytest.mark.parametrize("shape", [ModelShape(5, 6, 3, 24), SHAPE])
def test_another_model_takes_them_and_says_so(shape: ModelShape, tmp_path: Path) -> None:
    assert found(saved(tmp_path)).transferred_from is None
    other = found(tmp_path, shape, "xyz")
    assert other.transferred_from == "first"
    assert other.identity["transferred_from"] == "first"
    DistillCache().use(other, shape)


def drop(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    "changes",
    [
        drop("shift"),
        drop("layers.0.weight"),
        drop("layers.6.bias"),
        put("layers.9.weight", torch.ones(1)),
        put("layers.0.weight", torch.ones(128, 4)),
        put("layers.0.weight", torch.ones(64, 5)),
        put("layers.0.weight", torch.ones(())),
        put("layers.6.weight", torch.ones(2, 128)),
        put("shift", torch.ones(6)),
        lambda tensors: tensors.clear() or tensors.update({"w1": torch.ones(2, 3)}),
    ],
)
def test_weights_of_another_kind_are_refused(changes: Any, tmp_path: Path) -> None:
    whole = found(saved(tmp_path, changes))
    with pytest.raises(UserError, match=r"not a ranker of five numbers.*\.$"):
        DistillCache().use(whole, SHAPE)


def test_those_of_another_policy_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="those of distillcache, not of kvpop"):
        policy_weights.find(KVpop(), str(saved(tmp_path)), "second", lambda: "abc", SHAPE)


def test_without_weights_nothing_is_ranked() -> None:
    model = tiny_model()
    cache = new_cache(model, DistillCache(), 12)
    with pytest.raises(UserError, match=r"needs trained weights"):
        model(input_ids=torch.tensor([random_tokens(30)]), past_key_values=cache)


def test_a_narrower_ranker_is_one_too(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    narrow = {name: tensor.float() for name, tensor in tensors(random_ranker(0, width=16)).items()}
    policy = DistillCache()
    policy.use(replace(found(folder), tensors=narrow), SHAPE)
    assert policy._ranker is not None
    assert policy._ranker.layers[0].out_features == 16


def test_half_precision_is_enough(tmp_path: Path) -> None:
    whole = found(saved(tmp_path))
    halved = replace(whole, tensors={name: tensor.half() for name, tensor in whole.tensors.items()})
    kept = []
    for one in (whole, halved):
        policy = DistillCache()
        policy.use(one, SHAPE)
        cache = new_cache(tiny_model(), policy, 12)
        tiny_model()(input_ids=torch.tensor([random_tokens(30)]), past_key_values=cache)
        kept.append(set(cache.kept(0)[0].tolist()))
    assert len(kept[0] & kept[1]) >= 10


def test_a_run_says_whose_weights_it_used(tmp_path: Path) -> None:
    from fake_plugins import make_model

    first, second = make_model(tmp_path / "first"), make_model(tmp_path / "second", num_hidden_layers=3)
    folder = saved(tmp_path / "weights", base_model=_of(first))

    def identity(model: Path) -> dict[str, Any]:
        settings = RunSettings(
            policy="distillcache",
            suite="toy",
            budget="16",
            model=str(model),
            out=tmp_path / "runs",
            weights=str(folder),
        )
        found: dict[str, Any] = plan.make_plan(settings).fingerprint["policy"]["weights"]
        return found

    assert "transferred_from" not in identity(first)
    assert identity(second)["transferred_from"] == "first"


def _of(model: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    from evictbench.models import load

    source = load.resolve(str(model))
    shape = ModelShape.of(AutoConfig.from_pretrained(model))
    return {"name": "first", "sha256": load.weights_hash(source), "shape": policy_weights.shape_data(shape)}
