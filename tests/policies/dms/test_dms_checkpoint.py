"""Checkpoints with DMS's adapters: where they are looked for, what they are hashed by, and which ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugin_fixtures import installed
from fake_plugins import FakeGenerator, make_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from evictbench import hub
from evictbench.cli.run import describe_plan
from evictbench.errors import UserError
from evictbench.evaluation.plan import make_plan
from evictbench.evaluation.run import load_model, run
from evictbench.evaluation.settings import RunSettings
from evictbench.models import load, policy_weights
from evictbench.policies.dms import DMS, Settings
from evictbench.policies.dms.checkpoint import Options
from evictbench.policy import ModelShape
from evictbench.store import run_folder

pytestmark = pytest.mark.engine

__all__ = ["installed"]  # the fake suite, for every test here

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=8, hidden_size=32)
CONFIG = {"dms_separate_alpha": True, "dms_window_size": 24, "dms_cr": 4, "rms_norm_eps": 1e-5}


def adapters(layers: int = 2, kv_heads: int = 2, hidden: int = 32, prefix: str = "model.") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    held = {}
    for layer in range(layers):
        place = f"{prefix}layers.{layer}.self_attn.dms_proj_alpha"
        held[f"{place}.weight"] = torch.randn(kv_heads, hidden, generator=generator).bfloat16()
        held[f"{place}_norm.weight"] = torch.randn(hidden, generator=generator).bfloat16()
    return held


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVICTBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole model with adapters among its tensors."""
    folder = make_model(tmp_path / "tiny-dms", **CONFIG)
    held = load_file(folder / "model.safetensors")
    save_file(held | adapters(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def alone(folder: Path, held: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """A folder with the adapters alone, and the config of their model."""
    folder.mkdir()
    save_file(adapters() if held is None else held, folder / "adapters.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def find(where: Path, policy: DMS | None = None, shape: ModelShape = SHAPE) -> policy_weights.Weights:
    return policy_weights.find(policy or DMS(), str(where), "tiny", lambda: "sha256:of-the-model", shape)


def settings(model: Path, tmp_path: Path, **changes: Any) -> RunSettings:
    given = {"policy": "dms", "budget": "25%", "model": str(model), "out": tmp_path / "runs", "device": "cpu"}
    return RunSettings(**{**given, "suite": "toy", **changes})


def test_a_checkpoint_brings_its_adapters_and_they_are_not_left_over(model: Path, tmp_path: Path) -> None:
    plan = make_plan(settings(model, tmp_path))
    assert isinstance(plan.policy, DMS)
    assert not plan.policy.borrowed
    assert (plan.policy.reach, plan.policy.sinks, plan.policy.allot(0.25, 900)) == (24, 0, 0.0)
    assert plan.weights is not None
    assert plan.weights.origin == "in tiny-dms itself"
    assert plan.weights.transferred_from is None
    assert plan.fingerprint["policy"]["weights"] == {"sha256": plan.weights.sha256, "variant": ""}
    load_model(plan)
    unused = load.unused_tensors(plan.source)
    assert unused is not None
    assert unused.names == tuple(sorted(adapters()))
    assert unused.without(plan.weights.of_model) is None
    left = unused.without({unused.names[0]})
    assert left is not None
    assert (left.count, left.first) == (3, unused.names[1:])
    assert unused.without(frozenset()) is unused


def test_a_run_says_that_its_budget_is_a_target_and_its_prefill_without_effect(model: Path, tmp_path: Path) -> None:
    rows = dict(describe_plan(make_plan(settings(model, tmp_path, prefill="dense")), 0))
    assert rows["weights"].startswith("in tiny-dms itself, sha256 ")
    assert rows["budget"].endswith(", a target: what is seen is measured and may be another")
    assert rows["prefill"].startswith("dense (without effect: dms reads a prompt under its eviction)")
    rows = dict(describe_plan(make_plan(settings(model, tmp_path, policy="hoard", prefill="dense")), 0))
    assert rows["budget"].endswith("entries per KV head")
    assert rows["prefill"].startswith("dense, chunks")


class Watch:
    """A run's watcher that keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, sentence: str) -> None:
        self.warnings.append(sentence)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


def test_a_run_warns_of_adapters_only_under_another_policy(model: Path, tmp_path: Path) -> None:
    load.load_model(load.resolve(str(model)), "cpu")
    for policy, left in (("dms", None), ("hoard", 4)):
        watch = Watch()
        outcome = run(
            settings(model, tmp_path, policy=policy, limit=1),
            watch,
            lambda plan: (FakeGenerator(plan.tokenizer), "cpu"),
        )
        record = json.loads((outcome.plan.folder / run_folder.RUN).read_text())
        unused = record["sessions"][-1].get("unused_weights")
        assert (unused and unused["count"]) == left
        assert any("has no place for 4 of the tensors" in sentence for sentence in watch.warnings) == (left is not None)
        assert outcome.summary["warnings"] == watch.warnings


def test_the_weights_may_be_named_and_are_then_another_models(model: Path, tmp_path: Path) -> None:
    """A frozen model is the base model, so that its adapters serve that as well."""
    base = make_model(tmp_path / "base")
    named = make_plan(settings(base, tmp_path, weights=str(model))).weights
    own = make_plan(settings(model, tmp_path)).weights
    assert named is not None
    assert own is not None
    assert named.sha256 == own.sha256
    assert named.transferred_from == "a model that the checkpoint does not name"
    assert named.of_model == frozenset()
    for name in own.tensors:
        assert torch.equal(named.tensors[name], own.tensors[name])
    assert torch.equal(find(alone(tmp_path / "alone")).tensors["weight"], own.tensors["weight"])


def test_shards_are_read_and_hashed_together(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    held, place = adapters(), {}
    for layer, name in enumerate(("one.safetensors", "two.safetensors")):
        own = {key: tensor for key, tensor in held.items() if f"layers.{layer}." in key}
        save_file(own, folder / name, metadata={"format": "pt"})
        place |= dict.fromkeys(own, name)
    save_file({"model.norm.weight": torch.ones(32)}, folder / "three.safetensors", metadata={"format": "pt"})
    place["model.norm.weight"] = "three.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hashes = [find(folder).sha256]
    save_file({"model.norm.weight": torch.zeros(32)}, folder / "three.safetensors", metadata={"format": "pt"})
    assert find(folder).sha256 == hashes[0], "no adapter lies in that file"
    for name in ("one.safetensors", "two.safetensors"):
        changed = {key: tensor * 2 for key, tensor in load_file(folder / name).items()}
        save_file(changed, folder / name, metadata={"format": "pt"})
        hashes.append(find(folder).sha256)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"dms_alpha_scale": 50.0}))
    hashes.append(find(folder).sha256)
    assert len(set(hashes)) == 4


def test_a_hub_id_is_fetched_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "3e97c529bb03045394520c37"
    asked: list[object] = []
    monkeypatch.setattr(hub, "snapshot", lambda repo, revision, known_by: folder)

    def fetch(repo: str, into: Path, names: list[str]) -> None:
        asked.append(names)
        if names == ["*.safetensors"]:
            save_file(adapters(), into / "adapters.safetensors", metadata={"format": "pt"})

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(hub, "fetch_weights", fetch)
    found = policy_weights.find(DMS(), "someone/Qwen3-dms", "tiny", lambda: "", SHAPE)
    assert asked == [["weights.safetensors"], ["*.safetensors"]]
    assert found.origin == "someone/Qwen3-dms@3e97c529bb03"
    policy_weights.find(DMS(), "someone/Qwen3-dms", "tiny", lambda: "", SHAPE)
    assert len(asked) == 2, "what is there is not asked for again"


def without(*names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in adapters().items() if not name.endswith(names)}


@pytest.mark.parametrize(
    ("held", "config", "sentence"),
    [
        (without("0.self_attn.dms_proj_alpha_norm.weight"), {}, r"lack dms_proj_alpha_norm\.weight of layer 0\."),
        (without("1.self_attn.dms_proj_alpha.weight"), {}, r"lack dms_proj_alpha\.weight of layer 1\."),
        (adapters(layers=3), {}, r"in 3 layers, up to layer 2, and this model has 2 layers"),
        (adapters(kv_heads=4), {}, r"weight of shape \[4, 32\] in layer 0, and this model takes \[2, 32\]"),
        (adapters(hidden=16), {}, r"weight of shape \[2, 16\] in layer 0, and this model takes \[2, 32\]"),
        (
            adapters() | {"model.layers.0.self_attn.dms_proj_beta.weight": torch.ones(2)},
            {},
            r"have no place for: model\.layers\.0\.self_attn\.dms_proj_beta\.weight\.",
        ),
        ({"model.norm.weight": torch.ones(32)}, {}, r"hold no tensor of dms"),
        (adapters(), {"dms_alpha_per": "token"}, r"dms_alpha_per 'token': it is head or layer"),
        (adapters(), {"dms_alpha_scale": "big"}, r"dms_alpha_scale 'big': it is a number"),
    ],
)
def test_another_checkpoint_is_refused_in_a_sentence(
    held: dict[str, Tensor], config: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=sentence):
        find(alone(tmp_path / "gate", held, **config))


def test_a_checkpoint_without_what_its_config_promises_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny-dms", **CONFIG)
    with pytest.raises(UserError, match=r"weights in tiny-dms itself hold no tensor of dms"):
        make_plan(settings(folder, tmp_path))
    with pytest.raises(UserError, match=r"gate=borrowed is not possible with this model"):
        make_plan(settings(folder, tmp_path, policy="dms:gate=borrowed"))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"dms_window_size": 0}, "dms_window_size 0: it is a number of at least 1"),
        ({"dms_window_size": 1.5}, "dms_window_size 1.5: it is a whole number"),
        ({"dms_cr": True}, "dms_cr True: it is a number of at least 1"),
        ({"dms_alpha_scale": 0}, "dms_alpha_scale 0: then every token has one decision"),
        ({"dms_initial_alpha_offset": float("nan")}, "dms_initial_alpha_offset nan: it is a number"),
    ],
)
def test_options_that_dms_cannot_have_are_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Options.of(config)


def test_settings_come_before_the_checkpoints(tmp_path: Path) -> None:
    policy = DMS(Settings(window=7, sinks=3, alpha_per="layer"))
    policy.use(find(alone(tmp_path / "alone")), SHAPE)
    assert (policy.reach, policy.sinks) == (7, 3)
    z = policy.read(0, "residual", torch.randn(1, 5, 32))
    assert torch.equal(z[:, 0], z[:, 1])
