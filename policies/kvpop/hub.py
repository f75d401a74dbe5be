"""The authors' released checkpoint: what is known of it, and what is refused by name.

`sirluk/Qwen3-8B-KVpop-4x` (NXAI Community License) is a whole Qwen3-8B, trained further, with scorers in it and with
Python code of its own (model type qwen3kvpop). Its layout is known: `SINKS`, `WINDOW`, `POOL` and the state, which is
`kvpop`'s own division of `BUDGET` on that model. The names, shapes and gates of its scorers are not known here, so that
they are refused with the names that are found; they stand in the index of the checkpoint, for which no shard has to be
fetched. The model in it is read as Qwen3 (`evictbench.models.read_as`), under any other policy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.policy import ModelShape

MODEL_TYPE = "qwen3kvpop"

BUDGET, POOL, STATE = 4096, 3772, 64
"""Entries of a KV head in all, those of them that are chosen, and those that the mLSTM's memory is charged as."""

_SIZES = {"num_hidden_layers": "layers", "num_key_value_heads": "kv_heads", "head_dim": "head_dim"}
"""Sizes by their names in config.json and in a model's shape."""

_QWEN3 = re.compile(
    r"lm_head\.weight|model\.(embed_tokens|norm)\.weight|model\.layers\.\d+\.("
    r"(input|post_attention)_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj)\.(weight|bias)"
)
"""The tensors of the model itself."""

_NAMES_SHOWN = 24
"""Names in a sentence, at most; those of all layers count as one."""


class Released:
    """How `evictbench.models.policy_weights` reads such a checkpoint: kvpop's attribute `foreign`."""

    files: tuple[str, ...] = ("model.safetensors.index.json", "model.safetensors")

    def read(self, file: Path, origin: str, shape: ModelShape) -> NoReturn:
        """Raise UserError: for another model's checkpoint, for sizes that are not those of `shape`, for one without a
        scorer, and else with the names of the scorer's tensors and settings."""
        from evictbench.models.model_files import CONFIG, read_object

        config = read_object(file.parent / CONFIG) if (file.parent / CONFIG).is_file() else {}
        kind = config.get("model_type")
        if kind != MODEL_TYPE:
            raise UserError(
                f"The weights {origin} are a whole model ({kind or 'of no known type'}) and no weights of kvpop: name "
                f"a folder of `evictbench train`, or a checkpoint of the type {MODEL_TYPE}."
            )
        for name, ours in _SIZES.items():
            size, wanted = config.get(name), getattr(shape, ours)
            if size is not None and size != wanted:
                raise UserError(
                    f"The weights {origin} are those of a model with {name} {size}, and this model has {wanted}."
                )
        names = [name for name in _names(file) if not _QWEN3.fullmatch(name)]
        if not names:
            raise UserError(f"The weights {origin} ({MODEL_TYPE}) hold a Qwen3 model and no tensor of a scorer.")
        settings = sorted(config.keys() - _known_settings())
        says = f", and its config sets {', '.join(settings)}" if settings else ""
        raise UserError(
            f"The weights {origin} ({MODEL_TYPE}) are the authors' own, whose scorer kvpop cannot read: which of its "
            f"{len(names)} tensors is what is not published, and beside Qwen3's it has {_listed(names)}{says}."
        )


def _names(file: Path) -> list[str]:
    """The names of a checkpoint's tensors: from its index, or from its one file."""
    from evictbench.models.model_files import read_object
    from evictbench.models.safetensors_files import read_header

    if file.suffix != ".json":
        return list(read_header(file))
    tensors = read_object(file).get("weight_map")
    return list(tensors) if isinstance(tensors, Mapping) else []


def _known_settings() -> set[str]:
    """The names of a config that are Qwen3's, or say what code is to be run."""
    from transformers import Qwen3Config

    settings: Mapping[str, Any] = Qwen3Config().to_dict()
    return {*settings, "auto_map", "torch_dtype", "rope_theta", "rope_scaling"}


def _listed(names: Iterable[str]) -> str:
    """The names, those of all layers as one, with N for the layer and their number behind."""
    kinds = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in names)
    texts = [f"{kind} ({count})" if count > 1 else kind for kind, count in sorted(kinds.items())]
    shown = ", ".join(texts[:_NAMES_SHOWN])
    return shown if len(texts) <= _NAMES_SHOWN else f"{shown} and {len(texts) - _NAMES_SHOWN} more"


RELEASED = Released()
