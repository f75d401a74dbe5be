"""Released checkpoints that are a known model with a policy's tensors beside its own: read as that model.

They bring Python code and a model type of their own, which transformers does not know and asks to trust. What
evictbench measures is the model, whose attention is its own; the tensors beside it are a policy's, which reads them
itself (`policy_weights.ForeignFormat`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.errors import UserError, one_line
from evictbench.models.model_files import CONFIG, read_object

if TYPE_CHECKING:
    from transformers import PretrainedConfig

READ_AS: Mapping[str, str] = {"qwen3kvpop": "qwen3"}
"""Model types, by the type that is in config.json. qwen3kvpop: sirluk/Qwen3-8B-KVpop-4x (arXiv 2607.05061 v2)."""

_THEIRS = ("model_type", "architectures", "auto_map")
"""Entries that say what code is to be run."""


def known_config(folder: Path) -> PretrainedConfig | None:
    """The config of the model that a checkpoint in this folder is read as; None where config.json stands as it is.

    Raises UserError for entries that the model's config does not take.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content = read_object(folder / CONFIG)
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in READ_AS:
        return None
    entries = {name: value for name, value in content.items() if name not in _THEIRS}
    try:
        config: PretrainedConfig = CONFIG_MAPPING[READ_AS[kind]].from_dict(entries)
    except Exception as error:  # whatever transformers makes of entries that it cannot use
        reason = one_line(error)[:300]
        raise UserError(f"{folder / CONFIG} ({kind}) cannot be read as {READ_AS[kind]}: {reason}") from error
    return config
