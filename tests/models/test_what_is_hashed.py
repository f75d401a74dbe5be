"""What is hashed of a model is what is loaded: the files, and nothing outside the folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from broken_models import both, content, copy, entries, index, make_model, tensors, text

from evictbench.errors import UserError
from evictbench.models import bundled, file_hashes, load, model_files

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("own_cache")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "sharded", shards=True)


def sha256(folder: Path, code: bool = False) -> str:
    return load.weights_hash(load.resolve(str(folder)), code)


def first_weight(folder: Path) -> float:
    model = load.load_model(load.resolve(str(folder)), "cpu")
    return float(model.model.norm.weight[0])


def halved(held: dict) -> None:
    held["model.norm.weight"] *= 0.5


def test_the_hash_of_plain_folders_is_what_it_was(whole, sharded):
    """sha256 over "name sha256" lines of weights, config, generation config and tokenizer, in order."""
    import hashlib

    for folder in (whole, sharded):
        names = sorted(file.name for file in folder.iterdir() if file.name != "model.safetensors.index.json")
        lines = [f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n" for name in names]
        assert sha256(folder) == f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


@pytest.mark.parametrize(
    "change",
    [
        entries(rms_norm_eps=1e-5),
        entries("generation_config.json", eos_token_id=[1, 2]),
        content("chat_template.jinja", lambda old: old + b"!"),
        text("additional_chat_templates/tool.jinja", "{{ messages[0]['content'] }}"),
        text("special_tokens_map.json", '{"eos_token": "w2"}'),
        text("added_tokens.json", '{"<more>": 96}'),
        text("vocab.json", "{}"),
        text("merges.txt", ""),
        text("tokenizer.model", "pieces"),
        text("tekken.json", "{}"),
        both(text("config.4.0.0.json", "{}"), entries(configuration_files=["config.4.0.0.json"])),
        tensors(halved),
    ],
)
def test_what_influences_results_is_in_the_hash(whole, tmp_path, change):
    folder = copy(whole, tmp_path / "copy")
    before = sha256(folder)
    change(folder)
    assert sha256(folder) != before


@pytest.mark.parametrize(
    "change",
    [text("README.md", "# A model"), text("trainer_state.json", "{}"), text("model.py", "raise SystemExit")],
    ids=["readme", "trainer_state", "code that is not run"],
)
def test_what_is_not_read_is_not_in_the_hash(whole, tmp_path, change):
    folder = copy(whole, tmp_path / "copy")
    change(folder)
    assert sha256(folder) == sha256(whole)


def test_the_files_that_are_hashed_are_all_that_a_model_needs(sharded, tmp_path):
    """A folder of these files alone gives the same model, tokens, templates and end tokens."""
    import torch

    full = copy(sharded, tmp_path / "full")
    text("additional_chat_templates/tool.jinja", "{{ messages[0]['content'] }}")(full)
    named = {*model_files.weight_files(full, "full"), *model_files.small_files(full)}
    for name in (*named, model_files.INDEX):
        (tmp_path / "bare" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(full / name, tmp_path / "bare" / name)
    sources = [load.resolve(str(folder)) for folder in (full, tmp_path / "bare")]
    first, second = [load.load_model(source, "cpu") for source in sources]
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert first.generation_config.eos_token_id == second.generation_config.eos_token_id
    first, second = [load.load_tokenizer(source) for source in sources]
    assert first("w5 w96")["input_ids"] == second("w5 w96")["input_ids"] == [5, 96]
    assert first.chat_template == second.chat_template
    assert sorted(first.chat_template) == ["default", "tool"]


def test_every_vocabulary_file_of_transformers_is_known():
    import transformers

    found = set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py"):
        for names in re.findall(r"^VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", file.read_text(), re.DOTALL | re.MULTILINE):
            found |= set(re.findall(r":\s*\"([^\"]+\.[a-z]+)\"", names))
    unknown = {n for n in found if not any(model_files.fnmatch(n, pattern) for pattern in model_files.TOKENIZER)}
    assert len(found) > 10
    assert not unknown


def other_weights(folder: Path) -> None:
    """The same tensors with another value, under another name."""
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    tensors(halved, "other.safetensors")(folder)


def outside(name: str) -> str:
    return f"{name} lies outside the model's folder"


def link_out(name: str):
    """Move a file out of the folder, and leave a link in its place."""

    def move(folder: Path) -> None:
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return move


EVERYTHING = {"model.norm.weight": "weights.safetensors"}

REFUSED = {
    "index and single file": (
        both(
            other_weights,
            text(model_files.INDEX, json.dumps({"metadata": {}, "weight_map": {"a": "other.safetensors"}})),
        ),
        "holds its weights twice, in model.safetensors and in the files of model.safetensors.index.json",
    ),
    "absolute path": (index({"a": "/etc/x.safetensors"}), outside("/etc/x.safetensors")),
    "path upwards": (index({"a": "../x.safetensors"}), outside("../x.safetensors")),
    "missing file": (index({"a": "weights.safetensors", "b": "gone.safetensors"}), "lacks gone.safetensors"),
    "pickle in the index": (index({"a": "x.bin"}), "is no index of weights"),
    "number in the index": (index({"a": 3}), "is no index of weights"),
    "empty index": (index({}), "is no index of weights"),
    "index without metadata": (index('{"weight_map": {"a": "weights.safetensors"}}'), "is no index of weights"),
    "index that is a list": (index("[]"), "index.json holds a list"),
    "torn index": (index('{"weight_map": {'), "index.json is no JSON file"),
    "link to other weights": (link_out("model.safetensors"), outside("model.safetensors")),
    "link to another config": (link_out("config.json"), outside("config.json")),
    "link to another template": (link_out("chat_template.jinja"), outside("chat_template.jinja")),
    "file named in the config": (both(other_weights, entries(transformers_weights="../x.safetensors")), "lies outside"),
    "pickle named in the config": (entries(transformers_weights="adapter_model.bin"), "(transformers_weights)"),
    "distributed checkpoint": (text("shard-00001-model-00001-of-00001.safetensors", ""), "distributed checkpoint"),
    "config named in the config": (
        both(
            lambda f: text("config.4.0.0.json", "{}")(f.parent / "up"),
            entries(configuration_files=["../up/config.4.0.0.json"]),
        ),
        "lies outside",
    ),
    "adapter beside weights": (
        text("adapter_config.json", '{"base_model_name_or_path": "own/base"}'),
        "holds an adapter (adapter_config.json) beside a whole model",
    ),
    "only half a file": (
        content("model.safetensors", lambda old: old[: len(old) // 2]),
        "model.safetensors is cut short",
    ),
    "more than a file": (content("model.safetensors", lambda old: old + b"more"), "model.safetensors is damaged"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_leaves_open_what_is_loaded_is_refused(whole, tmp_path, case):
    folder = copy(whole, tmp_path / "broken")
    (tmp_path / "up").mkdir()
    change, sentence = REFUSED[case]
    change(folder)
    with pytest.raises(UserError) as refused:
        sha256(folder)
    assert sentence in str(refused.value)
    with pytest.raises(UserError):
        load.load_model(load.resolve(str(folder)), "cpu")


def test_a_file_that_the_config_names_is_hashed_and_loaded(whole, tmp_path):
    folder = copy(whole, tmp_path / "copy")
    both(other_weights, entries(transformers_weights="other.safetensors"))(folder)
    assert first_weight(folder) == 0.5 * first_weight(whole)
    assert model_files.weight_files(folder, "copy") == ["other.safetensors"]
    before = sha256(folder)
    tensors(halved)(folder)  # the file that is not loaded
    assert sha256(folder) == before


def test_a_tensor_in_two_shards_is_refused(sharded, tmp_path):
    import torch

    folder = copy(sharded, tmp_path / "copy")
    last = max(folder.glob("*.safetensors")).name
    tensors(lambda held: held.update({"model.embed_tokens.weight": torch.ones(97, 64)}), last)(folder)
    with pytest.raises(UserError, match=r"The tensor model.embed_tokens.weight lies both in"):
        sha256(folder)


@pytest.mark.parametrize("shared", [False, True], ids=["blobs of the repository", "blobs of the whole cache"])
def test_links_of_the_hubs_cache_are_inside(whole, tmp_path, shared):
    repository = tmp_path / "models--own--tiny"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(whole.iterdir())):
        blob = repository / "blobs" / str(number)
        if shared:
            shutil.copy(file, tmp_path / "blobs" / str(number))
            blob.symlink_to(Path("../../blobs") / str(number))
        else:
            shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert sha256(snapshot) == sha256(whole)
    assert first_weight(snapshot) == first_weight(whole)


def test_a_linked_folder_is_the_folder(whole, tmp_path):
    (tmp_path / "link").symlink_to(whole)
    assert sha256(tmp_path / "link") == sha256(whole)


def test_an_adapter_alone_is_told_what_to_do(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "own/base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"is an adapter of own/base and no model: merge it into its base model"):
        load.resolve(str(tmp_path))


def test_code_that_is_run_is_in_the_hash_and_other_code_is_not(whole, tmp_path):
    folder = copy(whole, tmp_path / "copy")
    both(entries(auto_map={"AutoConfig": "configuration_own.Own"}), text("configuration_own.py", "a = 1"))(folder)
    plain, with_code = sha256(folder), sha256(folder, code=True)
    assert plain != with_code
    text("configuration_own.py", "a = 2")(folder)
    assert (sha256(folder) == plain, sha256(folder, code=True) == with_code) == (True, False)
    entries(auto_map={"AutoConfig": "other/repository--configuration_own.Own"})(folder)
    with pytest.raises(UserError, match="takes its Python code from another repository"):
        sha256(folder, code=True)


@pytest.mark.parametrize("damage", ["a file in the way", "no permission"])
def test_a_cache_that_cannot_be_written_stops_no_local_model(whole, tmp_path, monkeypatch, damage):
    file_hashes._remembered.clear()
    cache = tmp_path / "no-cache"
    cache.write_text("in the way")
    if damage == "no permission":  # also for root, who may write everywhere
        monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "no")))
    monkeypatch.setenv("EVICTBENCH_CACHE", str(cache / "below"))
    assert sha256(whole).startswith("sha256:")


def test_a_file_changed_behind_its_times_is_read_again(whole, tmp_path):
    """Same name, size and time of change of the content: the time of change of the inode tells."""
    folder = copy(whole, tmp_path / "copy")
    before, state = sha256(folder), (folder / "model.safetensors").stat()
    content("model.safetensors", lambda old: old[:-1] + bytes([old[-1] ^ 1]))(folder)
    os.utime(folder / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (folder / "model.safetensors").stat().st_mtime_ns == state.st_mtime_ns
    assert sha256(folder) != before


def test_a_changed_file_of_the_converted_model_is_refused(tmp_path):
    (tmp_path / "tensors").write_bytes(b"12345678")
    sha = "ef797c8118f02dfb649607dd5d3f8c7623048c9c063d532cc95c5ed7a898a64f"
    (tmp_path / "conversion.json").write_text(json.dumps({"sizes": {"tensors": 8}, "sha256": {"tensors": sha}}))
    bundled.check_content(tmp_path)
    (tmp_path / "tensors").write_bytes(b"12345679")
    with pytest.raises(UserError, match=r"tensors was changed since evictbench wrote it: remove"):
        bundled.check_content(tmp_path)
    (tmp_path / "conversion.json").write_text(json.dumps({"sizes": {"tensors": 8}}))
    bundled.check_content(tmp_path)  # an earlier version wrote no hashes
