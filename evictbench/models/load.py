"""Models by name: the bundled one, a local folder, or a hub id. Each becomes a folder to load from."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from evictbench import hub
from evictbench.errors import UserError, one_line
from evictbench.models import bundled, model_files
from evictbench.models.config_checks import check_config, check_config_files, check_ids, check_vocabulary
from evictbench.models.devices import check_device, device_map, refuse_offloading
from evictbench.models.file_hashes import remembered_sha256
from evictbench.models.loaded_weights import UnusedTensors, check_loaded
from evictbench.models.read_as import known_config
from evictbench.models.safetensors_files import read_headers
from evictbench.models.supported import check_attention_interface, check_layers, check_supported, context_window

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "MODELS",
    "Source",
    "check_ids",
    "check_layers",
    "check_supported",
    "check_vocabulary",
    "context_window",
    "load_config",
    "load_model",
    "load_tokenizer",
    "resolve",
    "unused_tensors",
    "weights_hash",
    "whole_folder",
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

_LARGE = 500_000
"""Bytes of a JSON file that takes a noticeable time to read."""

_unused: dict[Source, UnusedTensors | None] = {}


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
        if not (path / model_files.CONFIG).is_file():
            model_files.refuse_adapter(path, name)
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
    """The model's config. For a hub id this fetches the small files of its repository, never weights.

    Raises UserError, naming the file, for a config that is damaged or that no model has, for weights quantised by an
    unknown method, and for a model that needs its own Python code where `trust_remote_code` is not given.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    folder = _folder(source, trust_remote_code)
    model_files.small_files(folder)  # each has to lie inside the folder
    check_config_files(folder)
    config: PretrainedConfig = known_config(folder) or _from_pretrained(
        AutoConfig, source, folder, trust_remote_code, what=f"{model_files.CONFIG} of"
    )
    brings_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if brings_code and not trust_remote_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _needs_code(source)
    check_config(config, folder, resolve_dtype(config, "auto"))
    return config


def resolve_dtype(config: PretrainedConfig, dtype: str) -> str:
    """The dtype that `--dtype` stands for ("bfloat16"); "auto" is the one that the checkpoint was saved in."""
    if dtype != "auto":
        return dtype
    text = config.get_text_config(decoder=True)
    saved = getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32"
    return str(saved).removeprefix("torch.")


def load_tokenizer(source: Source, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with its chat template where it has one. Raises UserError where it cannot be read."""
    from transformers import AutoTokenizer

    folder = _folder(source, trust_remote_code)
    names = model_files.small_files(folder)
    # A large vocabulary takes long to read twice: whether it is damaged is asked where it could not be used.
    model_files.check_objects(folder, [name for name in names if (folder / name).stat().st_size < _LARGE])
    config = known_config(folder)  # without one, transformers reads the file itself
    try:
        tokenizer: PreTrainedTokenizerBase = _from_pretrained(
            AutoTokenizer,
            source,
            folder,
            trust_remote_code,
            what="tokenizer of",
            **({} if config is None else {"config": config}),
        )
    except UserError:
        model_files.check_objects(folder, names)
        raise
    return tokenizer


def stated_end_tokens(source: Source, config: PretrainedConfig) -> int | list[int] | None:
    """`eos_token_id` of the generation config that comes with the model; where none does, of its config."""
    from transformers import GenerationConfig

    folder = _folder(source)
    if (folder / "generation_config.json").is_file():
        stated = _from_pretrained(GenerationConfig, source, folder, False).eos_token_id
    else:
        stated = GenerationConfig.from_model_config(config).eos_token_id
    return stated if isinstance(stated, int | list | None) else list(stated)


def load_model(
    source: Source, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model with its weights from safetensors, in eval mode, its attention implementation left alone.

    device: "auto" (one GPU if the weights fit in 70% of it, else spread over all GPUs; the CPU where there is none),
    "balanced" or "sequential" (spread in any case), or one device: "cpu", "cuda", "cuda:1", "mps". On the CPU its
    linear layers are packed, where a second copy of them fits (see packed_linear.py). dtype: "float32", "bfloat16",
    "float16", or "auto" for the one in the model's config.

    Raises UserError for an unsupported model, a device that is not there, weights that do not fit the model (see
    loaded_weights.py), and a model too large for its device. What was left over is in `unused_tensors`.
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
    folder = whole_folder(source, trust_remote_code)
    if source.kind == "bundled":
        bundled.check_content(folder)
    files = [folder / name for name in model_files.weight_files(folder, source.name)]
    stored = read_headers(files)
    # Left to itself, transformers takes the dtype of a model whose config names none from its weights.
    dtype = resolve_dtype(config, dtype)
    placement = device_map(device, stored.values(), config, dtype)
    try:
        with _progress_bars(source.kind != "bundled" and sys.stderr.isatty()):
            model, info = _from_pretrained(
                AutoModelForCausalLM,
                source,
                folder,
                trust_remote_code,
                config=config,
                dtype=getattr(torch, dtype),
                device_map=placement,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
            )
    except torch.OutOfMemoryError as error:
        raise UserError(f"The weights of {source.name} do not fit on {device}: {error}") from error
    refuse_offloading(model, source.name)
    check_attention_interface(type(model), config.model_type)
    _unused[source] = check_loaded(model, info, stored, source.name)
    loaded: PreTrainedModel = model.eval()
    check_layers(loaded)
    pack_linears(loaded, spare_bytes=psutil.virtual_memory().available // 2)
    return loaded


def whole_folder(source: Source, trust_remote_code: bool = False) -> Path:
    """The folder of a model's files, weights included: those of a hub model are fetched."""
    folder = _folder(source, trust_remote_code)
    if source.kind == "hub":
        hub.fetch_weights(source.repo, folder, model_files.weight_files(folder, source.name, whole=False))
    return folder


def unused_tensors(source: Source) -> UnusedTensors | None:
    """The tensors in a model's files that had no place in it when this process loaded it last; None: there are none, or
    it was not loaded."""
    return _unused.get(source)


def weights_hash(source: Source, trust_remote_code: bool = False) -> str:
    """A hash that stands for the model in a fingerprint, the same on any machine.

    It is the bundled file's pinned hash, a hub model's commit, or the sha256 of the files of a local folder that are
    loaded (see model_files.py). Where the model's own Python code is run, that code is a part of it. A local file is
    read once, and again only when it was changed. Raises UserError for weights that are not whole.
    """
    if source.kind == "bundled":
        return f"gguf-sha256:{bundled.GGUF_SHA256}:v{bundled.CONVERSION_VERSION}"
    folder = _folder(source, trust_remote_code)
    own_code = model_files.runs_own_code(folder, trust_remote_code)
    if source.kind == "hub":
        return f"commit:{folder.name}{':code' if own_code else ''}"
    weights = model_files.weight_files(folder, source.name)
    read_headers(folder / name for name in weights)
    names = sorted({*weights, *model_files.small_files(folder, own_code)})
    with ThreadPoolExecutor(max_workers=4) as pool:
        hashes = list(pool.map(remembered_sha256, [folder / name for name in names]))
    whole = hashlib.sha256()
    for name, sha256 in zip(names, hashes, strict=True):
        whole.update(f"{name} {sha256}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def _folder(source: Source, remote_code: bool = False) -> Path:
    """The folder to load from; the bundled model is converted, and a hub model's small files fetched, if need be."""
    if source.kind == "bundled":
        return bundled.ensure_converted()
    if source.kind == "hub":
        folder = hub.snapshot(source.repo, source.revision, remote_code)
    else:
        assert source.path is not None
        folder = source.path
    model_files.refuse_adapter(folder, source.name)
    return folder


def _from_pretrained(
    auto: Any, source: Source, folder: Path, trust_remote_code: bool, what: str = "model", **arguments: Any
) -> Any:
    """`auto.from_pretrained` from a folder. Raises UserError for whatever transformers makes of files that it cannot
    use. what: what is loaded, in the sentence."""
    import torch

    try:
        return auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True, **arguments)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        reason = one_line(error)
        if "trust_remote_code" in reason:
            raise _needs_code(source) from error
        if isinstance(error, KeyError):
            reason = f"it asks for {reason}, which transformers does not know or does not find"
        elif " " not in reason:
            reason = f"{type(error).__name__} {reason}"
        raise UserError(f"The {what} {source.name} cannot be loaded: {reason[:300]}") from error


def _needs_code(source: Source) -> UserError:
    return UserError(
        f"The model {source.name} brings its own Python code, which is not run unless asked for: "
        "read it, then say --trust-remote-code."
    )


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
