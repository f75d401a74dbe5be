"""Prompts as text again: runs keep token ids, and the model's tokenizer, where it is on this machine, reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"


def load(model: str, weights: str, folder: Path | None = None) -> Tokenizer | None:
    """The tokenizer of a model, from `folder`, from the model's own, or from the hub's local cache at the commit that
    `weights` names; None where it is in none of them. Neither the network nor the model is asked."""
    from tokenizers import Tokenizer

    file = folder / FILE if folder is not None else _find(model, weights)
    if file is None or not file.is_file():
        return None
    try:
        found: Tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{file} is not a tokenizer: {error}.") from None
    return found


def decode(tokenizer: Tokenizer, ids: Sequence[int], border: int | None) -> tuple[str, str]:
    """The prompt up to the border, and what comes after it, as the model saw them, special tokens included."""
    at = len(ids) if border is None else border
    return _text(tokenizer, ids[:at]), _text(tokenizer, ids[at:])


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


def _find(model: str, weights: str) -> Path | None:
    from evictbench import bundled

    if model == bundled.NAME:
        return bundled.converted_folder() / FILE
    local = Path(model).expanduser() / FILE
    if local.is_file():
        return local
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    revision = weights.removeprefix("commit:") if weights.startswith("commit:") else None
    try:
        found = try_to_load_from_cache(model.partition("@")[0], FILE, revision=revision)
    except (HFValidationError, ValueError):
        return None
    return Path(found) if isinstance(found, str) else None
