"""What each layer of a model keeps of a text, as the model's config says it.

Only layers that attend to the whole text evict. The others hold what their model gives them: the last tokens of a
window, a state of a fixed size, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Holds = Literal["text", "window", "chunk", "state", "nothing"]
"""What a layer holds. text: the keys and values of the whole text, from which a policy evicts. window: those of the
last `size` tokens. chunk: those of the block of `size` tokens that the next token lies in. state: a recurrent or
convolution state, whose size does not grow. nothing: it has no attention, or reads what another layer holds."""

BY_NAME: dict[str, Holds] = {
    "full_attention": "text",
    "attention": "text",
    "hybrid": "text",
    "hybrid_sliding": "window",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "moe": "nothing",
    "mlp": "nothing",
}
"""What a layer holds, by the name of its kind in the `layer_types` of configs. Other kinds are not supported."""


WITH_STATE = frozenset({"hybrid", "hybrid_sliding"})
"""Kinds of layers that hold a state besides their keys and values."""


@dataclass(frozen=True)
class LayerKind:
    """The kind of one layer.

    name: as the config names it. holds: None for a kind that is not supported. size: tokens of a window or chunk.
    state: it holds a state as well.
    """

    name: str
    holds: Holds | None
    size: int | None = None
    state: bool = False

    @property
    def evicts(self) -> bool:
        """Whether a policy decides what stays of it."""
        return self.holds == "text"


def layer_kinds(config: Any) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers, in order. config: of transformers."""
    text = config.get_text_config(decoder=True)
    names: Sequence[str] = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    sizes = {"window": _setting(text, "sliding_window"), "chunk": _setting(text, "attention_chunk_size")}
    if not names:
        window = sizes["window"] if getattr(text, "use_sliding_window", True) else None
        name = "sliding_attention" if window else "chunked_attention" if sizes["chunk"] else "full_attention"
        names = [name] * int(getattr(text, "num_hidden_layers", 0))
    longest = getattr(text, "max_position_embeddings", None)
    kinds = []
    for name in names:
        holds = BY_NAME.get(name)
        size = sizes.get(holds or "")
        if holds in sizes and longest and size and size >= longest:  # it never slides
            holds, size = "text", None
        kinds.append(LayerKind(name, holds, size, name in WITH_STATE))
    return tuple(kinds)


def _setting(text: Any, name: str) -> int | None:
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # it is set for each layer
        return None
    return int(value) if value else None
