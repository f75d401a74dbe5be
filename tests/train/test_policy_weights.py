"""Weights: written, found, refused, and named by the results that they made."""

import json
import sys

import pytest
import torch
from fake_plugins import make_model
from safetensors.torch import save_file
from toy_policies import GATE, TOY, Toy, ToyGate

from evictbench.errors import UserError
from evictbench.evaluation import plan
from evictbench.evaluation.settings import RunSettings
from evictbench.models import load, policy_weights
from evictbench.policy import ModelShape
from evictbench.registry import parse_policy

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=8)


def card(**changes):
    base = {"name": "tiny", "sha256": "sha256:abc", "shape": policy_weights.shape_data(SHAPE)}
    return {"base_model": base, "transferable": False, "settings": {}, "training": {"steps": 3}} | changes


@pytest.fixture
def folder(tmp_path):
    policy_weights.save(tmp_path / "toy", "toy", "mean", {"weight": torch.ones(2, 2, 16)}, card())
    return tmp_path / "toy"


def find(where, policy="toy", shape=SHAPE, sha256="sha256:abc", settings=""):
    chosen = parse_policy((GATE if policy == "toy_gate" else TOY) + settings)
    return policy_weights.find(chosen.policy(chosen.config), str(where), "tiny", lambda: sha256, shape)


def test_what_is_saved_is_found_again(folder):
    weights = find(folder)
    assert torch.equal(weights.tensors["weight"], torch.ones(2, 2, 16))
    assert (weights.card["policy"], weights.card["variant"]) == ("toy", "mean")
    assert weights.transferred_from is None
    assert weights.identity == {"sha256": weights.sha256, "variant": "mean"}


def test_the_hash_stands_for_tensors_and_card(folder):
    first = find(folder).sha256
    policy_weights.save(folder, "toy", "mean", {"weight": torch.ones(2, 2, 16)}, card())
    assert find(folder).sha256 == first
    policy_weights.save(folder, "toy", "mean", {"weight": torch.ones(2, 2, 16) * 2}, card())
    second = find(folder).sha256
    policy_weights.save(folder, "toy", "mean", {"weight": torch.ones(2, 2, 16) * 2}, card(calibration={"a": 1}))
    assert len({first, second, find(folder).sha256}) == 3


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"policy": "toy_gate"}, "are those of toy, not of toy_gate"),
        ({"settings": ":label=max"}, "are toy's variant 'mean', and 'max' is asked for"),
        ({"shape": ModelShape(3, 4, 2, 8)}, "trained on tiny, a model of another shape: 2 layers, where tiny has 3"),
        (
            {"shape": ModelShape(2, 4, 4, 16)},
            "2 kv_heads, where tiny has 4 and 8 head_dim, where tiny has 16",
        ),
    ],
)
def test_others_are_refused(folder, how, sentence):
    with pytest.raises(UserError, match=sentence):
        find(folder, **how)


def test_a_model_of_the_same_shape_takes_them_and_says_so(folder):
    weights = find(folder, sha256="sha256:other")
    assert weights.transferred_from == "tiny"
    assert weights.identity["transferred_from"] == "tiny"
    assert str(weights).endswith("transferred from tiny")


def test_the_fine_tuned_model_is_their_own(folder):
    policy_weights.save(folder, "toy", "mean", {}, card(finetuned={"sha256": "sha256:tuned", "folder": "model"}))
    assert find(folder, sha256="sha256:tuned").transferred_from is None


def test_transferable_ones_load_on_any_shape(folder):
    policy_weights.save(folder, "toy_gate", "mean", {"bias": torch.zeros(1)}, card(transferable=True))
    weights = find(folder, policy="toy_gate", shape=ModelShape(9, 9, 3, 3), sha256="sha256:other")
    assert weights.transferred_from == "tiny"


def breakage(folder, kind):
    if kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "no tensors":
        (folder / "weights.safetensors").unlink()
    elif kind == "cut":
        file = folder / "weights.safetensors"
        file.write_bytes(file.read_bytes()[:-7])
    elif kind == "no card":
        (folder / "config.json").write_text('{"model_type": "llama"}')
    elif kind == "no json":
        (folder / "config.json").write_text("{")
    elif kind == "a list":
        (folder / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("no config", "holds no weights of a policy: it has no config.json"),
        ("no tensors", "lack weights.safetensors"),
        ("cut", "weights.safetensors is cut short"),
        ("no card", "is not the card of a policy's weights"),
        ("no json", "is not the card of a policy's weights"),
        ("a list", "is not the card of a policy's weights"),
    ],
)
def test_broken_folders_are_refused(folder, kind, sentence):
    breakage(folder, kind)
    with pytest.raises(UserError, match=sentence):
        find(folder)


@pytest.mark.parametrize("where", ["./nowhere", "nowhere", "a/b/c", "nobody/nothing"])
def test_what_is_not_there_is_refused(where):
    with pytest.raises(UserError) as raised:
        find(where)
    assert str(raised.value).endswith(".")


def test_a_file_is_refused(folder):
    with pytest.raises(UserError, match="are a file; give the folder"):
        find(folder / "weights.safetensors")


def test_numbers_beyond_half_are_refused(tmp_path):
    with pytest.raises(UserError, match="does not fit float16"):
        policy_weights.save(tmp_path, "toy", "mean", {"weight": torch.full((2,), 1e6)}, card(), half=True)


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """Toy and ToyGate as classes of a package with weights of its own."""
    package = tmp_path / "packaged_toy"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import toy_policies as toy\nclass Toy(toy.Toy): pass\nclass ToyGate(toy.ToyGate): pass\n"
    )
    policy_weights.save(package / "weights" / "tiny-mean", "toy", "mean", {"weight": torch.ones(2, 2, 16)}, card())
    policy_weights.save(
        package / "weights" / "tiny-max", "toy_gate", "max", {"bias": torch.zeros(1)}, card(transferable=True)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import packaged_toy

    yield packaged_toy
    del sys.modules["packaged_toy"]


def test_those_that_come_with_a_policy_are_found(packaged):
    weights = policy_weights.find(packaged.Toy(), None, "tiny", lambda: "sha256:abc", SHAPE)
    assert (weights.origin, weights.transferred_from) == ("bundled tiny-mean", None)


def test_without_any_the_way_to_some_is_named(packaged):
    others = ((packaged.Toy(), "big/model"), (packaged.Toy(Toy.Config("max")), "tiny"), (ToyGate(), "tiny"))
    for policy, model in others:
        with pytest.raises(UserError, match=r"evictbench train --policy toy.* --weights") as raised:
            policy_weights.find(policy, None, model, lambda: "sha256:x", SHAPE)
        assert model in str(raised.value)
    with pytest.raises(UserError, match=r"no weights for big .*come .* --model '/my models/big' --data"):
        policy_weights.find(packaged.Toy(), None, "big", lambda: "sha256:x", SHAPE, model_argument="/my models/big")


def test_transferable_ones_that_come_with_a_policy_serve_any_model(packaged):
    weights = policy_weights.find(
        packaged.ToyGate(Toy.Config("max")), None, "other", lambda: "sha256:x", ModelShape(5, 5, 5, 5)
    )
    assert weights.transferred_from == "tiny"


@pytest.fixture
def planned(tmp_path):
    def call(model, **given):
        return plan.make_plan(
            RunSettings(
                **{"policy": TOY, "suite": "toy", "budget": "16", "model": str(model), "out": tmp_path / "runs"} | given
            )
        )

    return call


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (torch.ones(2, 2, 16, dtype=torch.int8), r"are not those of a training: weight holds int8 numbers"),
        (
            torch.full((2, 2, 16), torch.nan),
            r"are not finite in float32: NaN or infinite numbers in 1 of 1 tensors, weight first",
        ),
        (torch.full((2, 2, 16), -torch.inf, dtype=torch.float16), r"are not finite in float16"),
    ],
)
def test_weights_that_no_training_makes_are_refused(folder, tensor, sentence):
    save_file({"weight": tensor}, folder / policy_weights.TENSORS)
    with pytest.raises(UserError, match=sentence):
        find(folder)


def test_weights_are_whole_and_inside_their_folder(folder, tmp_path):
    file = folder / policy_weights.TENSORS
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"weights.safetensors lies outside the folder of weights"):
        find(folder)
    file.unlink()
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=r"weights.safetensors is a Git LFS pointer"):
        find(folder)


def test_a_run_takes_its_weights_and_its_result_names_them(trained, planned, tiny, tmp_path):
    outcome, _ = trained()
    made = planned(tiny, weights=str(outcome.folder))
    assert torch.equal(made.policy.weight, policy_weights.load(str(outcome.folder)).tensors["weight"])
    assert made.fingerprint["policy"]["weights"] == {
        "sha256": policy_weights.load(str(outcome.folder)).sha256,
        "variant": "mean",
    }
    other, _ = trained(out=tmp_path / "other", seed=5)
    assert planned(tiny, weights=str(other.folder)).folder != made.folder
    with pytest.raises(UserError, match=r"no weights for tiny \(variant mean\) come with evictbench") as missing:
        planned(tiny)
    # The command that makes some has the model as it was given, and the policy with its settings.
    assert f"evictbench train --policy {TOY} --model {tiny} --data" in str(missing.value)
    twin = make_model(tmp_path / "twin", initializer_range=0.1)
    assert planned(twin, weights=str(outcome.folder)).fingerprint["policy"]["weights"]["transferred_from"] == "tiny"
    deeper = make_model(tmp_path / "deeper", num_hidden_layers=3)
    with pytest.raises(UserError, match="2 layers, where deeper has 3"):
        planned(deeper, weights=str(outcome.folder))
    with pytest.raises(UserError, match="hoard is not learned and takes no weights"):
        planned(tiny, policy="hoard", weights=str(outcome.folder))


def test_the_fine_tuned_model_runs_with_its_weights(trained, planned):
    outcome, _ = trained(finetune=True)
    made = planned(outcome.folder / "model", weights=str(outcome.folder))
    assert "transferred_from" not in made.fingerprint["policy"]["weights"]
    assert made.fingerprint["weights"] == load.weights_hash(load.resolve(str(outcome.folder / "model")))


def test_the_card_in_words_says_what_its_data_says(trained):
    outcome, _ = trained()
    text = (outcome.folder / "README.md").read_text()
    data = json.loads((outcome.folder / "config.json").read_text())
    assert data["base_model"]["sha256"] in text
    assert f"- data sha256: {data['training']['data_sha256']}" in text
    assert '- data: ["texts.jsonl"]' in text
    assert "on models of this shape only" in text
