"""The files of a model's folder that transformers opens: found as it finds them, and each inside the folder.

These are the files that are hashed. Where a folder leaves open which of two files are opened, it is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from evictbench.errors import UserError
from evictbench.hub import SMALL_FILES, TEMPLATE_FOLDER
from evictbench.models.safetensors_files import is_lfs_pointer, lfs_pointer

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"

CONFIGS = (CONFIG, "generation_config.json")
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "vocab-src.json", "entity_vocab.json", "dict.txt", "bpe.codes"),
    *("vocab-tgt.json", "target_vocab.json", "normalizer.json", "word_shape.json", "word_pronunciation.json"),
    *("emoji.json", "byte_maps.json", "prophetnet.tokenizer", "tekken*.json", "tokenizer.model*"),
    *("*.model", "*.spm", "*.tiktoken"),
)
"""Names and patterns of what a tokenizer of transformers may read, in the model's folder itself."""

_VERSIONED = {CONFIG: "configuration_files", "tokenizer_config.json": "fast_tokenizer_files"}
"""Files that may list others, one for each version of transformers, which then stand in for a file of a fixed name."""

_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Files by which transformers knows a checkpoint of torch's distributed format; it then reads no other."""


def weight_files(folder: Path, model: str, whole: bool = True) -> list[str]:
    """Names of the safetensors files that hold the weights, sorted.

    model: its name in sentences. whole: the files have to be there; else only what is there is checked. Raises
    UserError where none are named or several answers are possible, and for a file outside the folder.
    """
    config = read_object(folder / CONFIG)
    if any(_DISTRIBUTED.fullmatch(file.name) for file in folder.iterdir()):
        raise UserError(
            f"The folder of {model} holds a distributed checkpoint (shard-...): save the model with save_pretrained."
        )
    named = config.get("transformers_weights")
    if named is not None and not (
        isinstance(named, str) and named.endswith((".safetensors", ".safetensors.index.json"))
    ):
        raise UserError(
            f"{folder / CONFIG} names {named!r} as the file of its weights (transformers_weights): weights are loaded "
            "from safetensors files only."
        )
    if named is None and (folder / INDEX).is_file() and (folder / WEIGHTS).is_file():
        raise UserError(
            f"The folder of {model} holds its weights twice, in {WEIGHTS} and in the files of {INDEX}: remove one of "
            "the two, as only one would be loaded."
        )
    index = INDEX if named is None else named
    if index.endswith(".index.json") and (named is not None or (folder / index).is_file()):
        check_inside(folder, [index])
        names = _indexed(folder / index)
    else:
        names = [WEIGHTS if named is None else named]
    check_inside(folder, names)
    absent = [name for name in names if not (folder / name).is_file()]
    if whole and absent:
        named_by = f", which {index} names" if len(names) > 1 else ""
        raise UserError(
            f"The folder {model} lacks {absent[0]}{named_by}: weights are loaded from safetensors files only."
        )
    return names


def small_files(folder: Path, own_code: bool = False) -> list[str]:
    """Names of the other files that are read: configs, the tokenizer's files and chat templates; sorted.

    own_code: the model's Python code is run, which may read any of its small files; that code is among them then.
    """
    present = {file.name for file in folder.iterdir() if file.is_file()}
    listed = {*CONFIGS}
    for name, key in _VERSIONED.items():
        versions = read_object(folder / name).get(key) if name in present else None
        if isinstance(versions, list):
            listed |= {str(version) for version in versions if (folder / str(version)).is_file()}
    patterns = (*TOKENIZER, *SMALL_FILES) if own_code else TOKENIZER
    found = {name for name in present if any(fnmatch(name, pattern) for pattern in patterns)}
    found |= {f"{TEMPLATE_FOLDER}/{file.name}" for file in (folder / TEMPLATE_FOLDER).glob("*.jinja")}
    found |= {name for name in listed if (folder / name).is_file()}
    if own_code:
        found |= {str(file.relative_to(folder)) for file in folder.rglob("*.py")}
    check_inside(folder, found)
    return sorted(found)


def runs_own_code(folder: Path, trust_remote_code: bool) -> bool:
    """Whether Python code that comes with the model is run. Raises UserError where that code is another model's, whose
    state no hash here would stand for."""
    if not trust_remote_code:
        return False
    maps = [read_object(folder / name).get("auto_map") for name in _VERSIONED if (folder / name).is_file()]
    text = json.dumps([entry for entry in maps if entry])
    if "--" in text:
        raise UserError(
            f"The model in {folder} takes its Python code from another repository (auto_map): copy that code into the "
            "model's folder, and name it there."
        )
    return any(maps)


def refuse_adapter(folder: Path, model: str) -> None:
    """Raise UserError for a folder with an adapter in it: alone it is no model, and beside weights it would change
    them on machines that have peft, and not on others."""
    if not (folder / ADAPTER).is_file():
        return
    base = read_object(folder / ADAPTER).get("base_model_name_or_path")
    merge = "merge it into its base model (peft's merge_and_unload, then save_pretrained), and name that folder"
    if (folder / CONFIG).is_file():
        raise UserError(
            f"The folder of {model} holds an adapter ({ADAPTER}) beside a whole model: remove it to measure the model "
            f"as it is, or {merge}."
        )
    raise UserError(f"{model} is an adapter{f' of {base}' if base else ''} and no model: {merge}.")


def check_inside(folder: Path, names: Iterable[str], what: str = "the model's folder") -> None:
    """Raise UserError for a file that lies outside the folder, by its name or because it is a link. what: the folder,
    in the sentence.

    Links of the hub's local cache, from a snapshot to its blobs, are inside.
    """
    root = folder.resolve()
    places = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        repository = root.parent.parent
        places += [(repository / "blobs").resolve(), (repository.parent / "blobs").resolve()]
    for name in names:
        target = (folder / name).resolve()
        if not any(target.is_relative_to(place) for place in places):
            raise UserError(
                f"{folder / name} lies outside {what}, in {target.parent}: what is measured has to be inside. Copy it "
                "there."
            )


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises UserError, naming the file, for any other."""
    try:
        if is_lfs_pointer(file):
            raise lfs_pointer(file)
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no JSON file, or a damaged one.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__} and not an object with names, as it should.")
    return content


def check_objects(folder: Path, names: Iterable[str]) -> None:
    """Raise UserError for one of these files that is there and damaged: a JSON file has to hold an object."""
    for name in names:
        file = folder / name
        if not file.is_file():
            continue
        if name.endswith(".json"):
            read_object(file)
        elif is_lfs_pointer(file):
            raise lfs_pointer(file)


def _indexed(index: Path) -> list[str]:
    """The files that an index names."""
    content = read_object(index)
    weights = content.get("weight_map")
    files = list(weights.values()) if isinstance(weights, dict) else []
    whole = files and all(isinstance(file, str) and file.endswith(".safetensors") for file in files)
    if not whole or not isinstance(content.get("metadata"), dict):
        raise UserError(
            f"{index} is no index of weights: it has to have `metadata`, and a `weight_map` "
            "from every tensor to a safetensors file."
        )
    return sorted(set(files))
