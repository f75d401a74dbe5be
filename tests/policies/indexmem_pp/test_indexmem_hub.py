"""The authors' released gates, as synthetic checkpoints in the layouts of their code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evictbench import hub
from evictbench.errors import UserError
from evictbench.models import policy_weights
from evictbench.policies.indexmem_pp import IndexMem
from evictbench.policies.indexmem_pp.scorer import scorers
from evictbench.policy import ModelShape

SHAPE = ModelShape(layers=3, heads=4, kv_heads=2, head_dim=16, hidden_size=64)
WIDTH = 24
NEWER = {"w_in": "input_proj", "w_out": "magnitude_proj", "w_decay": "retention_proj"}
CONFIG = {
    "objective": "rvkl",
    "model": "Qwen/Qwen3-8B",
    "scorer": "scalar",
    "scalar_mid_dim": WIDTH,
    "scalar_pos_slope": 1e-6,
    "scalar_decay": True,
    "scalar_decay_ref": 16384.0,
    "scalar_decay_init": -1.0,
    "pin_mode": "local+sink",
    "n_sink": 4,
    "n_local": 96,
    "gate_budget": 256.0,
}


def layer(seed: int) -> dict[str, Tensor]:
    """One layer's tensors, in bfloat16 as released and under the names of the released code."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return {
        "in_norm.weight": normal(64),
        "in_norm.bias": normal(64),
        "w_in.weight": normal(WIDTH, 64),
        "mid_norm.weight": normal(WIDTH),
        "mid_norm.bias": normal(WIDTH),
        "w_out.weight": normal(2, WIDTH),
        "w_decay.weight": normal(2, WIDTH),
        "w_decay.bias": normal(2),
        "gate_scale": torch.tensor(1.5),
    }


def released(**changes: Any) -> dict[str, Any]:
    """A checkpoint as released, optimiser state and all."""
    indexer = {
        f"model.layers.{index}.self_attn.indexer.{name}": tensor
        for index in range(SHAPE.layers)
        for name, tensor in layer(index).items()
    }
    optim = {"state": {0: {"step": torch.tensor(600.0), "exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3}]}
    return {"indexer": indexer, "step": 600, "config": dict(CONFIG), "optim": optim} | changes


def converted() -> dict[str, Any]:
    """The same after their converter."""
    named = {}
    for index in range(SHAPE.layers):
        for name, tensor in layer(index).items():
            first, dot, rest = name.partition(".")
            tensor = tensor.reshape(1).float() if name == "gate_scale" else tensor
            named[f"{index}.{NEWER.get(first, first)}{dot}{rest}"] = tensor
    scorer = {
        **{"kind": "mlp", "hidden_size": 64, "n_heads": 2, "mid_dim": WIDTH, "norm_eps": 1e-5, "pos_slope": 1e-6},
        **{"gate_scale": True, "decay": True, "age_scale": 16384.0, "decay_init": -1.0},
    }
    payload = {"scorer_config": scorer, "scorers": named, "step": 0}
    return payload | {"training_config": None, "source_config": dict(CONFIG)}


def theirs(tensors: dict[str, Tensor], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Score and rate `[heads, S]` as their scorer has them, written out, in float64."""
    at = {name: tensor.double() for name, tensor in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / spread * at[f"{name}.weight"] + at[f"{name}.bias"]

    inner = norm(norm(hidden, "in_norm") @ at["w_in.weight"].T, "mid_norm")
    inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
    score = (inner @ at["w_out.weight"].T).T + 1e-6 * torch.arange(hidden.shape[0])
    return score, -(1 + (inner @ at["w_decay.weight"].T + at["w_decay.bias"]).exp()).log().T


def write(folder: Path, payload: Any, name: str = "final.pt") -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(payload, folder / name)
    return folder


def find(where: object, model: str = "Qwen/Qwen3-8B", shape: ModelShape = SHAPE) -> policy_weights.Weights:
    return policy_weights.find(IndexMem(), str(where), model, lambda: "sha256:of-the-model", shape)


@pytest.mark.parametrize("payload", [released(), converted()], ids=["released", "converted"])
def test_a_checkpoint_scores_as_it_did(payload: dict[str, Any], tmp_path: Path) -> None:
    found = find(write(tmp_path / "gate", payload))
    assert found.transferred_from is None
    assert found.card["settings"] == {"sinks": 4, "window": 96, "centroids": 64, "beta": 256.0, "width": WIDTH}
    assert all(tensor.dtype == torch.float32 for tensor in found.tensors.values())
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for index, scorer in enumerate(scorers(found.tensors, SHAPE)):
        score, rate = scorer.double()(hidden[None])
        known_score, known_rate = theirs(layer(index), hidden)
        torch.testing.assert_close(score[0], known_score, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(rate[0], known_rate, rtol=1e-6, atol=1e-8)
        assert scorer.gate_scale.tolist() == [1.5]


def test_the_policy_takes_it_and_a_result_names_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "gate", released())
    policy, found = IndexMem(), find(folder)
    policy.use(found, SHAPE)
    assert (policy.sinks, policy.window) == (4, 96)
    first = found.identity["sha256"]
    payload = released()
    payload["indexer"]["model.layers.0.self_attn.indexer.w_out.weight"] += 1
    assert find(write(folder, payload)).identity["sha256"] != first
    assert find(folder, "Qwen/Qwen3-8B-Base").transferred_from == "Qwen/Qwen3-8B"
    assert find(folder, "models/Qwen3-8B").transferred_from is None
    del payload["config"]["model"]
    assert find(write(folder, payload)).transferred_from == "a model that the checkpoint does not name"


def test_what_was_pinned_in_training_is_what_is_protected(tmp_path: Path) -> None:
    """No window was pinned: then the published one stands, and so on."""
    for pinned, expected in (("sink", (4, 128)), ("local", (4, 96)), ("none", (4, 128))):
        payload = released(config=CONFIG | {"pin_mode": pinned, "n_sink": 4})
        settings = find(write(tmp_path / pinned, payload)).card["settings"]
        assert (settings["sinks"], settings["window"]) == expected
    bare = released(config={})
    assert find(write(tmp_path / "bare", bare)).card["settings"]["window"] == 128


def without(payload: dict[str, Any], *names: str) -> dict[str, Any]:
    return payload | {"indexer": {name: t for name, t in payload["indexer"].items() if not name.endswith(names)}}


def config_without(*names: str) -> dict[str, Any]:
    payload = converted()
    scorer = {name: value for name, value in payload["scorer_config"].items() if name not in names}
    return payload | {"scorer_config": scorer}


def having(payload: dict[str, Any], **more: Tensor) -> dict[str, Any]:
    prefix = "model.layers.1.self_attn.indexer."
    return payload | {"indexer": payload["indexer"] | {f"{prefix}{name}": t for name, t in more.items()}}


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (
            without(released(), "layers.1.self_attn.indexer.w_in.weight", "layers.2.self_attn.indexer.gate_scale"),
            r"lack w_in\.weight of layer 1, gate_scale of layer 2\.",
        ),
        (without(released(), "w_decay.weight", "w_decay.bias"), r"lack w_decay\.weight of layer 0, .* and 2 more\."),
        (
            having(released(), w_cin=torch.zeros(3)),
            r"has no place for: model\.layers\.1\.self_attn\.indexer\.w_cin\.",
        ),
        (having(released(), **{"w_in.weight": torch.zeros(5, 64)}), r"w_in\.weight in unequal shapes, .*\(5, 64\)\."),
        (released(config=CONFIG | {"scorer": "conv"}), "those of the scorer 'conv', and only 'scalar'"),
        (converted() | {"scorer_config": {"kind": "linear"}}, "those of the scorer 'linear', and only 'mlp'"),
        (config_without("age_scale", "norm_eps"), r"a scorer_config that lacks norm_eps, age_scale\."),
        (
            converted() | {"scorer_config": converted()["scorer_config"] | {"conv_kernel": 4}},
            r"a scorer_config with conv_kernel, which no MLP scorer has\.",
        ),
        (released(config=CONFIG | {"scalar_pos_slope": 0.0}), "scalar_pos_slope 0, and indexmem_pp scores with 1e-06"),
        (released(config=CONFIG | {"scalar_decay_ref": 8192.0}), "scalar_decay_ref 8192, and .* with 16384"),
        (released(model={"model.norm.weight": torch.ones(64)}), "trained together with their model"),
        ({"state_dict": {}, "step": 3}, "final.pt holds state_dict, step, and neither indexer nor scorers"),
        ([1, 2], "final.pt holds nothing"),
        (released(config=CONFIG, indexer={}), r"lack in_norm\.weight of layer 0, "),
    ],
)
def test_another_checkpoint_is_refused_in_a_sentence(payload: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        find(write(tmp_path / "gate", payload))


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "gate", released())
    with pytest.raises(UserError, match="another shape: 3 layers, where m has 2 and 2 kv_heads, where m has 4"):
        find(folder, "m", ModelShape(layers=2, heads=4, kv_heads=4, head_dim=16, hidden_size=64))
    narrow = ModelShape(layers=3, heads=4, kv_heads=2, head_dim=16, hidden_size=48)
    with pytest.raises(UserError, match="read hidden states of width 64, and this model's have 48"):
        IndexMem().use(find(folder, "m", narrow), narrow)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04cut short"])
def test_a_broken_file_is_a_sentence(content: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path / "gate", {})
    (folder / "final.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read: final\.pt is damaged"):
        find(folder)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "gate", {"indexer": Path("elsewhere")})
    with pytest.raises(UserError, match=r"no file of tensors and plain data"):
        find(folder)


def test_a_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no weights of a policy"):
        find(write(tmp_path / "gate", {}, "other.pt"))


def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository may hold nothing but the checkpoint: then there is no folder before it is fetched."""
    folder = tmp_path / "3e97c529bb03045394520c37"
    asked: list[object] = []

    def snapshot(repo: str, revision: str | None, **options: Any) -> Path:
        asked.append((repo, revision, options["known_by"]))
        return folder

    def fetch(repo: str, into: Path, names: list[str]) -> None:
        asked.append(names)
        write(into, released())

    monkeypatch.setattr(hub, "snapshot", snapshot)
    monkeypatch.setattr(hub, "fetch_weights", fetch)
    found = find("someone/Qwen3-8B-gate@main")
    files = IndexMem.foreign.files
    assert asked == [
        ("someone/Qwen3-8B-gate", "main", ("config.json", *files)),
        ["weights.safetensors", *files],
    ]
    assert found.origin == "someone/Qwen3-8B-gate@3e97c529bb03"
    find("someone/Qwen3-8B-gate@main")
    assert len(asked) == 3  # it is there already
