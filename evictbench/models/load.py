"""Models by name: the bundled one, a local folder, or a hub id. Each becomes a folder to load from."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from evictbench import hub
from evictbench.errors import UserError
from evictbench.models import bundled
from evictbench.models.devices import check_device, device_map, refuse_offloading
from evictbench.models.supported import check_attention_interface, check_layers, check_supported, context_window
from evictbench.store.files import file_sha256

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "MODELS",
    "Source",
    "check_layers",
    "check_supported",
    "context_window",
    "load_config",
    "load_model",
    "load_tokenizer",
    "resolve",
    "weights_hash",
]

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    name: what the user gave. path: the folder of a local model. repo, revision: those of a hub id, written owner/name
    or owner/name@revision.
    """

    name: str
    kind: Literal["bundled", "local", "hub"]
    path: Path | None = None
    repo: str = ""
    revision: str | None = None

    @property
    def result_name(self) -> str:
        """The model's name in results: a local model's folder name, else the name as given."""
        return Path(self.name).expanduser().resolve().name if self.kind == "local" else self.name


@dataclass(frozen=True)
class KnownModel:
    """A line of `evictbench list models`. window: the context window in tokens, answer included."""

    name: str
    kind: Literal["bundled", "hub"]
    parameters: str
    window: int
    summary: str


MODELS = (
    KnownModel(bundled.NAME, "bundled", bundled.PARAMETERS, bundled.CONTEXT_WINDOW, bundled.SUMMARY),
    KnownModel("Qwen/Qwen3-4B", "hub", "4.0B", 40_960, "reasoning; DMS, KVpop, IndexMem++"),
    KnownModel("Qwen/Qwen3-8B", "hub", "8.2B", 40_960, "reasoning; most published numbers"),
    KnownModel("Qwen/Qwen3-32B", "hub", "32.8B", 40_960, "reasoning, large"),
    KnownModel("meta-llama/Llama-3.1-8B-Instruct", "hub", "8.0B", 131_072, "long context; licence to accept"),
    KnownModel("mistralai/Mistral-7B-Instruct-v0.3", "hub", "7.2B", 32_768, "SnapKV's family"),
)
"""Models to start with. Any other that `check_supported` accepts can be used too, by hub id or by folder."""

_HASHED_WITH_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def resolve(name: str) -> Source:
    """The source that a `--model` argument names. Loads nothing and asks no network.

    Raises UserError for a folder that is missing or holds no model, and for what cannot be a hub id.
    """
    if name == bundled.NAME:
        return Source(name, "bundled")
    if name.startswith("shape:"):
        raise UserError(f"{name} is a shape with random weights and no tokenizer: it is for evictbench trace alone.")
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"The folder {name} holds no model: it has no config.json.")
        return Source(name, "local", path=path.absolute())
    if name and path.exists():
        raise UserError(f"The model {name} is a file; give the folder that holds config.json and *.safetensors.")
    if name.startswith((".", "~", "/")) or name.count("/") > 1:
        raise UserError(f"There is no folder {name}.")
    repo, _, revision = name.partition("@")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo, re.ASCII) and (revision or "@" not in name):
        return Source(name, "hub", repo=repo, revision=revision or None)
    near = difflib.get_close_matches(name, [model.name for model in MODELS], n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UserError(
        f"There is no model {name!r}: it is neither {bundled.NAME}, nor a folder here, nor a hub id (owner/name).{hint}"
    )


def source_of(model: PreTrainedModel) -> Source:
    """The source that a model in memory was loaded from. Raises UserError where its path names none."""
    path = model.name_or_path or ""
    if path and Path(path) == bundled.converted_folder():
        return Source(bundled.NAME, "bundled")
    return resolve(path)


def load_config(source: Source, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's config. For a hub id this fetches the small files of its repository, never weights."""
    from transformers import AutoConfig

    config: PretrainedConfig = _from_pretrained(
        AutoConfig, source, _folder(source, trust_remote_code), trust_remote_code
    )
    return config


def resolve_dtype(config: PretrainedConfig, dtype: str) -> str:
    """The dtype that `--dtype` stands for ("bfloat16"); "auto" is the one that the checkpoint was saved in."""
    if dtype != "auto":
        return dtype
    text = config.get_text_config(decoder=True)
    saved = getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32"
    return str(saved).removeprefix("torch.")


def load_tokenizer(source: Source, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with its chat template where it has one."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _from_pretrained(
        AutoTokenizer, source, _folder(source, trust_remote_code), trust_remote_code
    )
    return tokenizer


def load_model(
    source: Source, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model with its weights from safetensors, in eval mode, its attention implementation left alone.

    device: "auto" (one GPU if the weights fit in 70% of it, else spread over all GPUs; the CPU where there is none),
    "balanced" or "sequential" (spread in any case), or one device: "cpu", "cuda", "cuda:1", "mps". On the CPU its
    linear layers are packed, where a second copy of them fits (see packed_linear.py). dtype: "float32", "bfloat16",
    "float16", or "auto" for the one in the model's config.

    Raises UserError for an unsupported model, a device that is not there, weights that are missing or incomplete, and a
    model too large for its device.
    """
    import psutil
    import torch
    from transformers import AutoModelForCausalLM

    from evictbench.models.packed_linear import pack_linears

    if dtype not in get_args(Dtype):
        raise UserError(f"The dtype {dtype!r} is none of {', '.join(get_args(Dtype))}.")
    check_device(device)
    config = load_config(source, trust_remote_code)
    check_supported(config)
    folder = _folder(source, trust_remote_code)
    names = _weight_files(source, folder)
    if source.kind == "hub":
        hub.fetch_weights(source.repo, folder, names)
    placement = device_map(device, [folder / name for name in names], config, dtype)
    try:
        with _progress_bars(source.kind != "bundled" and sys.stderr.isatty()):
            model, info = _from_pretrained(
                AutoModelForCausalLM,
                source,
                folder,
                trust_remote_code,
                config=config,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                device_map=placement,
                use_safetensors=True,
                output_loading_info=True,
            )
    except torch.OutOfMemoryError as error:
        raise UserError(f"The weights of {source.name} do not fit on {device}: {error}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UserError(
            f"The weights of {source.name} are incomplete: {len(missing)} tensors are missing, {missing[0]} first."
        )
    refuse_offloading(model, source.name)
    check_attention_interface(type(model), config.model_type)
    loaded: PreTrainedModel = model.eval()
    check_layers(loaded)
    pack_linears(loaded, spare_bytes=psutil.virtual_memory().available // 2)
    return loaded


def weights_hash(source: Source) -> str:
    """A hash that stands for the model in a fingerprint, the same on any machine.

    It is the bundled file's pinned hash, a hub model's commit, or the sha256 of a local folder's weights, config and
    tokenizer. A local file is read once, and again only when its size or time of change is another.
    """
    if source.kind == "bundled":
        return f"gguf-sha256:{bundled.GGUF_SHA256}:v{bundled.CONVERSION_VERSION}"
    folder = _folder(source)
    if source.kind == "hub":
        return f"commit:{folder.name}"
    names = _weight_files(source, folder)
    names += [name for name in _HASHED_WITH_WEIGHTS if (folder / name).is_file()]
    with ThreadPoolExecutor(max_workers=4) as pool:
        hashes = list(pool.map(_cached_sha256, [folder / name for name in names]))
    whole = hashlib.sha256()
    for name, sha256 in sorted(zip(names, hashes, strict=True)):
        whole.update(f"{name} {sha256}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def _folder(source: Source, remote_code: bool = False) -> Path:
    """The folder to load from; the bundled model is converted, and a hub model's small files fetched, if need be."""
    if source.kind == "bundled":
        return bundled.ensure_converted()
    if source.kind == "hub":
        return hub.snapshot(source.repo, source.revision, remote_code)
    assert source.path is not None
    return source.path


def _from_pretrained(auto: Any, source: Source, folder: Path, trust_remote_code: bool, **arguments: Any) -> Any:
    """`auto.from_pretrained` from a folder; raises UserError for what a user can put right."""
    try:
        return auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True, **arguments)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip()
        if "trust_remote_code" in reason:
            raise UserError(
                f"The model {source.name} brings its own Python code, which is not run unless asked for: "
                "read it, then say --trust-remote-code."
            ) from error
        raise UserError(f"The model {source.name} cannot be loaded: {' '.join(reason.split())[:300]}") from error


@contextlib.contextmanager
def _progress_bars(wanted: bool) -> Iterator[None]:
    """Inside, show no progress bars of transformers unless wanted."""
    from transformers.utils import logging

    if wanted or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _weight_files(source: Source, folder: Path) -> list[str]:
    """Names of the safetensors files, from the index if there is one; those of a hub model need not be there yet."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    absent = [name for name in names if not (folder / name).is_file()]
    if source.kind != "hub" and absent:
        raise UserError(f"The folder {source.name} lacks {absent[0]}: weights are loaded from safetensors files only.")
    return names


def _cached_sha256(file: Path) -> str:
    """The sha256 of a file, remembered in the cache folder under its path, size and time of change."""
    state = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()
    remembered = bundled.cache_folder() / "hashes" / key
    if remembered.is_file() and len(sha256 := remembered.read_text()) == 64:
        return sha256
    sha256 = file_sha256(file)
    remembered.parent.mkdir(parents=True, exist_ok=True)
    remembered.write_text(sha256)
    return sha256
