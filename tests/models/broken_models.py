"""Model folders for tests: a tiny random model with its tokenizer, and ways to break a copy of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = 97
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5\n"

Break = Callable[[Path], object]
"""Changes a model's folder."""


def make_tokenizer(folder: Path, words: int = WORDS) -> None:
    """Save a tokenizer of whole words, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", eos_token="w1")
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def make_model(folder: Path, shards: bool = False) -> Path:
    """Save the model, in one file or in several with an index."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="100KB" if shards else "1GB")
    make_tokenizer(folder)
    return folder


def copy(model: Path, folder: Path) -> Path:
    return shutil.copytree(model, folder, symlinks=True)


def text(name: str, content: str) -> Break:
    """Write a file, and the folder that it lies in."""

    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return write


def entries(name: str = "config.json", drop: tuple[str, ...] = (), **changed: Any) -> Break:
    """Change entries of a JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | changed
        (folder / name).write_text(json.dumps({key: value for key, value in content.items() if key not in drop}))

    return change


def tensors(change: Callable[[dict[str, Any]], object], name: str = "model.safetensors") -> Break:
    """Change the tensors of a file."""

    def rewrite(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        held = load_file(folder / name)
        change(held)
        save_file(held, folder / name, {"format": "pt"})

    return rewrite


def content(name: str, change: Callable[[bytes], bytes]) -> Break:
    """Change the bytes of a file."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def both(*breaks: Break) -> Break:
    return lambda folder: [one(folder) for one in breaks]


def index(files: Any, metadata: Any = None) -> Break:
    """Put an index in the place of the single file. files: the tensors' places, or another content altogether."""
    whole = {"metadata": metadata or {}, "weight_map": files} if isinstance(files, dict) else files
    return both(
        lambda folder: (folder / "model.safetensors").rename(folder / "weights.safetensors"),
        text("model.safetensors.index.json", whole if isinstance(whole, str) else json.dumps(whole)),
    )
