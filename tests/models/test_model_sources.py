"""Models by name: what a name means, what is refused before weights are read, and what names the weights."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from evictbench import hub
from evictbench.errors import UserError
from evictbench.models import file_hashes, load

pytestmark = pytest.mark.engine

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def local(tmp_path: Path, tiny_llama, own_cache) -> Path:
    """A tiny model saved in two safetensors files and an index."""
    folder = tmp_path / "tiny"
    tiny_llama().save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty local cache of the hub, and a hub that is switched off."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.snapshot.cache_clear()
    return tmp_path / "hub"


def cached(hub_cache: Path, model: Path) -> Path:
    """Lay a model out as the hub's cache has it: models--own--tiny/snapshots/<commit>, refs/main."""
    repo = hub_cache / "models--own--tiny"
    snapshot = repo / "snapshots" / COMMIT
    shutil.copytree(model, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize(
    ("name", "kind", "repo", "revision"),
    [
        ("smollm2", "bundled", "", None),
        ("Qwen/Qwen3-8B", "hub", "Qwen/Qwen3-8B", None),
        ("Qwen/Qwen3-8B@b968826", "hub", "Qwen/Qwen3-8B", "b968826"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "hub", "mistralai/Mistral-7B-Instruct-v0.3", None),
    ],
)
def test_what_a_name_means(name, kind, repo, revision):
    source = load.resolve(name)
    assert (source.name, source.kind, source.repo, source.revision) == (name, kind, repo, revision)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("./no/such/folder", "There is no folder ./no/such/folder."),
        ("/no/such/folder", "There is no folder /no/such/folder."),
        ("a/b/c", "There is no folder a/b/c."),
        ("smolm2", "Did you mean smollm2?"),
        ("Qwen3-8B", "Did you mean Qwen/Qwen3-8B?"),
        ("owner/na me", "nor a hub id (owner/name)"),
        ("owner/name@", "nor a hub id (owner/name)"),
        ("", "neither smollm2, nor a folder here, nor a hub id"),
    ],
)
def test_names_that_mean_nothing(name, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        load.resolve(name)
    assert sentence in str(refused.value)


def test_folder_without_a_model_and_a_file(tmp_path):
    with pytest.raises(UserError, match=r"it has no config\.json"):
        load.resolve(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is a file; give the folder"):
        load.resolve(str(tmp_path / "model.safetensors"))


def test_local_folder_loads_with_the_weights_it_holds(local, tiny_llama):
    import torch

    model = load.load_model(load.resolve(str(local)), "cpu", "float32")
    assert not model.training
    for (name, saved), (_, loaded) in zip(tiny_llama().named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(saved, loaded), name


@pytest.mark.parametrize(("dtype", "wanted"), [("bfloat16", "bfloat16"), ("auto", "float32")])
def test_dtype(local, dtype, wanted):
    import torch

    assert load.load_model(load.resolve(str(local)), "cpu", dtype).dtype == getattr(torch, wanted)


def test_unknown_dtype(local):
    with pytest.raises(UserError, match="'int4' is none of auto, float32, bfloat16, float16"):
        load.load_model(load.resolve(str(local)), "cpu", "int4")


def test_weights_come_from_safetensors_only(local):
    import torch

    for file in local.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, local / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"lacks model\.safetensors: weights are loaded from safetensors files only"):
        load.load_model(load.resolve(str(local)), "cpu")


def test_missing_shard_and_missing_tensor_are_sentences(local):
    from safetensors.torch import load_file, save_file

    shard = max(local.glob("*.safetensors"))
    tensors = load_file(shard)
    dropped = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != dropped}, shard, {"format": "pt"})
    with pytest.raises(UserError, match=rf"incomplete: 1 tensors are missing, {dropped} first"):
        load.load_model(load.resolve(str(local)), "cpu")
    shard.unlink()
    with pytest.raises(UserError, match=f"lacks {shard.name}"):
        load.load_model(load.resolve(str(local)), "cpu")


def test_torn_config_is_a_sentence(local):
    (local / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(UserError, match=r"config\.json is no JSON file, or a damaged one"):
        load.load_config(load.resolve(str(local)))


def test_folder_without_a_tokenizer_is_a_sentence(local):
    with pytest.raises(UserError, match=r"The tokenizer of .* cannot be loaded"):
        load.load_tokenizer(load.resolve(str(local)))


def test_remote_code_runs_only_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("EVICTBENCH_TEST_MARK", str(tmp_path / "ran"))
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "odd", "auto_map": {"AutoConfig": "configuration_odd.OddConfig"}})
    )
    (folder / "configuration_odd.py").write_text(
        "import os, pathlib\n"
        "from transformers import PretrainedConfig\n"
        "pathlib.Path(os.environ['EVICTBENCH_TEST_MARK']).touch()\n"
        "class OddConfig(PretrainedConfig):\n"
        "    model_type = 'odd'\n"
    )
    source = load.resolve(str(folder))
    with pytest.raises(UserError, match="say --trust-remote-code"):
        load.load_config(source)
    assert not (tmp_path / "ran").exists()
    assert load.load_config(source, trust_remote_code=True).model_type == "odd"
    assert (tmp_path / "ran").exists()


def test_hub_model_out_of_reach_is_a_sentence(hub_cache):
    with pytest.raises(
        UserError, match=r"own/tiny is neither a folder here nor in the local hub cache.*HF_HUB_OFFLINE"
    ):
        load.load_config(load.resolve("own/tiny"))


def test_hub_model_from_the_local_cache(hub_cache, local):
    snapshot = cached(hub_cache, local)
    for name in ("own/tiny", f"own/tiny@{COMMIT}"):
        source = load.resolve(name)
        assert load.load_config(source).model_type == "llama"
        assert load.weights_hash(source) == f"commit:{COMMIT}"
        assert load.load_model(source, "cpu").config.num_hidden_layers == 2
    max(snapshot.glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="The weights of own/tiny could not be fetched from the hub: HF_HUB_OFFLINE"):
        load.load_model(load.resolve("own/tiny"), "cpu")


def test_only_the_small_files_and_the_named_weights_are_fetched(hub_cache, local, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(repo, revision=None, allow_patterns=None, **_):
        asked.append((repo, revision, allow_patterns))
        return str(hub_cache / "models--own--tiny" / "snapshots" / COMMIT)

    snapshot = cached(hub_cache, local)
    names = sorted(file.name for file in snapshot.glob("*.safetensors"))
    moved = [(file, file.read_bytes()) for file in snapshot.glob("*.safetensors")]
    for file, _ in moved:
        file.unlink()
    monkeypatch.setattr(hub, "why_unreachable", lambda *_: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    source = load.resolve("own/tiny")
    load.load_config(source)
    with pytest.raises(UserError):
        load.load_model(source, "cpu")  # the stand-in brings nothing
    assert asked == [
        ("own/tiny", None, hub.SMALL_FILES),
        ("own/tiny", COMMIT, ["additional_chat_templates/*.jinja"]),
        ("own/tiny", COMMIT, names),
    ]
    assert "*.py" not in hub.SMALL_FILES


def test_a_silent_network_is_given_up_on(monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    released = threading.Event()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: released.wait(600))
    assert hub.why_unreachable(timeout=0.2) == "no answer within 0.2 seconds"
    released.set()


def test_local_hash_follows_the_bytes_and_not_the_place(local, tmp_path):
    first = load.weights_hash(load.resolve(str(local)))
    shutil.copytree(local, tmp_path / "copy")
    assert load.weights_hash(load.resolve(str(tmp_path / "copy"))) == first
    shard = max((tmp_path / "copy").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert load.weights_hash(load.resolve(str(tmp_path / "copy"))) != first
    config = json.loads((local / "config.json").read_text()) | {"rms_norm_eps": 1e-5}
    (local / "config.json").write_text(json.dumps(config))
    assert load.weights_hash(load.resolve(str(local))) != first


def test_unchanged_weights_are_not_read_twice(local, monkeypatch):
    first = load.weights_hash(load.resolve(str(local)))

    def fail(*_):
        raise AssertionError("read again")

    monkeypatch.setattr(file_hashes, "file_sha256", fail)
    assert load.weights_hash(load.resolve(str(local))) == first
    file_hashes._remembered.clear()  # as another process begins
    assert load.weights_hash(load.resolve(str(local))) == first


def test_every_listed_model_resolves():
    for model in load.MODELS:
        assert load.resolve(model.name).kind == model.kind
