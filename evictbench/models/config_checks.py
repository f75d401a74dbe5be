"""Checks of a model's config: sizes that no model has, and what transformers would pass over in silence.

`config.json` is checked before transformers reads it, whose errors name neither the file nor the entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.models.model_files import CONFIG, CONFIGS, check_objects, read_object

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "n_embd", "n_head", "n_layer", "n_positions"),
)
"""Entries that are whole numbers from 1 on, where they are set; some architectures list one for each layer."""

_END_TOKEN = "eos_token_id"


def check_config_files(folder: Path) -> None:
    """Check config.json and generation_config.json. Raises UserError that names file and entry."""
    check_objects(folder, CONFIGS)
    content = read_object(folder / CONFIG)
    kind = content.get("model_type")
    if not isinstance(kind, str) or not kind:
        found = "is missing" if kind is None else f"is {kind!r}"
        raise UserError(f"{folder / CONFIG} does not say which kind of model it is: model_type {found}.")
    text = content.get("text_config")
    for part in (content, text if isinstance(text, dict) else {}):
        for name in _COUNTS:
            _check_count(folder / CONFIG, name, part.get(name))
        quantisation = part.get("quantization_config")
        if quantisation is not None:
            _check_quantisation(folder / CONFIG, quantisation)
    generation = folder / CONFIGS[1]
    if generation.is_file():
        ends = read_object(generation).get(_END_TOKEN)
        if not all(isinstance(end, int) for end in (ends if isinstance(ends, list) else [ends]) if end is not None):
            raise UserError(f"{generation} has {_END_TOKEN} {ends!r}, which is neither a token id nor a list of them.")


def check_config(config: PretrainedConfig, folder: Path, dtype: str) -> None:
    """Check a config that transformers has read, with its defaults. dtype: the one that "auto" stands for. Raises
    UserError."""
    import torch

    file = folder / CONFIG
    text: Any = config.get_text_config(decoder=True)
    sizes = {name: getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads", "hidden_size")}
    heads, kv_heads, hidden = (size if isinstance(size, int) else None for size in sizes.values())
    if heads and kv_heads and heads % kv_heads:
        raise UserError(f"{file} does not fit itself: {heads} attention heads cannot share {kv_heads} KV heads evenly.")
    if heads and hidden and hidden % heads and not getattr(text, "head_dim", None):
        raise UserError(f"{file} does not fit itself: a hidden size of {hidden} is no multiple of {heads} heads.")
    saved = getattr(torch, dtype, None)
    if not isinstance(saved, torch.dtype) or not saved.is_floating_point:
        raise UserError(f"{file} names {dtype!r} as the dtype of its weights, which is none that a model runs in.")


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, model: str) -> None:
    """Raise UserError where the tokenizer's own vocabulary is larger than the model's embedding. Tokens that were added
    to it and never come up may lie past the end."""
    rows = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        raise UserError(
            f"The tokenizer of {model} has {tokenizer.vocab_size:,} tokens, and the model's embedding has {rows:,} "
            f"(vocab_size in {CONFIG}): they do not belong together."
        )


def check_ids(prompts: Iterable[Sequence[int]], config: PretrainedConfig, model: str) -> None:
    """Raise UserError for a prompt with a token that the model has no embedding of."""
    rows = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    largest = max((max(ids, default=0) for ids in prompts), default=0)
    if isinstance(rows, int) and largest >= rows:
        raise UserError(
            f"The tokenizer of {model} gives the token {largest}, and the model's embedding ends with {rows - 1} "
            f"(vocab_size in {CONFIG}): they do not belong together."
        )


def _check_count(file: Path, name: str, value: Any) -> None:
    for count in value if isinstance(value, list) else [value]:
        if count is not None and (type(count) is not int or count < 1):
            raise UserError(f"{file} has {name} {count!r}; it has to be a whole number from 1 on.")


def _check_quantisation(file: Path, entry: Any) -> None:
    """Transformers loads weights of a method that it does not know as if they were not quantised."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    if not isinstance(entry, Mapping):
        raise UserError(f"{file} has a quantization_config that is no object.")
    method = entry.get("quant_method")
    by_bits = entry.get("load_in_8bit") or entry.get("load_in_4bit")
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING and not by_bits:
        named = "without naming the method" if method is None else f"by the method {method!r}, unknown to transformers"
        raise UserError(f"{file} says that the weights are quantised {named}: they cannot be read.")
