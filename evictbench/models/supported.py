"""Which models can be measured: those with plain softmax attention in every layer, a key and a value per KV head."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from evictbench.errors import UserError
from evictbench.policy.layer_kinds import layer_kinds

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

REFUSED_SETTINGS = {
    "num_kv_shared_layers": "layers that share the keys and values of others",
    "cross_attention_layers": "cross-attention layers",
}
"""Config settings that change attention, or what its cache holds, when they are set."""

REFUSED_TYPES = {
    "diffllama": "differential attention",
    "doge": "dynamic-mask attention",
    "jetmoe": "a mixture of attention heads, which repeats the keys after they are cached",
    "minimax_m3_vl_text": "block-sparse attention",
}
"""Model types whose attention differs without a setting that says so."""

ENCODER_TYPES = {"bert-generation"}
"""Model types that see the whole text unless their config says `is_decoder`, besides masked language models."""

PLAIN_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
"""Model types whose layers are what their config says: nothing is left to find by a pass without weights."""


def check_supported(config: PretrainedConfig) -> None:
    """Raise UserError for a model whose attention is not plain softmax attention, naming the layers or the feature."""
    text: Any = config.get_text_config(decoder=True)
    kind = text.model_type
    if config.is_encoder_decoder:
        raise _refusal(kind, "it is an encoder-decoder")
    kinds = layer_kinds(config)
    odd: dict[str, list[int]] = defaultdict(list)
    for number, layer in enumerate(kinds):
        if layer.holds is None or (layer.holds in ("window", "chunk") and layer.size is None):
            odd[layer.name].append(number)
    if odd:
        parts = [f"{len(layers)} have `{what}` ({_ranges(layers)})" for what, layers in odd.items()]
        raise _refusal(kind, f"of its {len(kinds)} layers " + ", and ".join(parts))
    if not any(layer.evicts for layer in kinds):
        raise _refusal(kind, "none of its layers attends to the whole text, so that there is nothing to evict")
    for setting, meaning in REFUSED_SETTINGS.items():
        if getattr(text, setting, None):
            raise _refusal(kind, f"it has {meaning} ({setting} is set in its config)")
    if kind in REFUSED_TYPES:
        raise _refusal(kind, f"it has {REFUSED_TYPES[kind]}")
    _check_model_class(config)
    if kind not in PLAIN_TYPES and _is_built_in(config):
        reason = _odd_pass(_Described(config))
        if reason:
            raise _refusal(kind, reason)


def check_layers(model: PreTrainedModel) -> None:
    """Raise UserError for a model whose layers hand something else to attention than its config says.

    The model has its weights: this finds what `check_supported` cannot see without them.
    """
    from evictbench.cache import probe
    from evictbench.cache.attention import Unsupported

    kind = model.config.get_text_config(decoder=True).model_type
    if kind in PLAIN_TYPES or model in _looked_at:
        return
    try:
        probe.check_layers(model)
    except Unsupported as error:
        raise _refusal(kind, error.reason) from None
    _looked_at.add(model)


_looked_at: WeakSet[PreTrainedModel] = WeakSet()


def check_attention_interface(model_class: Any, kind: str) -> None:
    """Raise UserError for a model class whose attention cannot be replaced through transformers' interface."""
    if not model_class._can_set_attn_implementation():
        raise _refusal(kind, "its attention does not go through transformers' attention interface")


def context_window(config: PretrainedConfig) -> int:
    """The most tokens that the model reads, its answer included.

    RoPE scaling that the config sets counts. Where frequencies change with the length of the text (dynamic NTK,
    LongRoPE), the window ends before they do.
    """
    from evictbench.cache.rope import fixed_frequencies_below

    text: Any = config.get_text_config(decoder=True)
    window = getattr(text, "max_position_embeddings", None)
    if not window:
        raise UserError(f"The config of this {text.model_type} model does not say how long its context window is.")
    if (below := fixed_frequencies_below(config)) is not None:
        return below - 1
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in {"yarn", "linear"} and rope.get("factor"):
        original = rope.get("original_max_position_embeddings") or window
        window = max(window, original * rope["factor"])
    return int(window)


class _Described:
    """A config that is found again by all that it says."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.text = config.to_json_string(use_diff=False)

    def __hash__(self) -> int:
        return hash((type(self.config), self.text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Described) and (type(self.config), self.text) == (type(other.config), other.text)


@cache
def _odd_pass(described: _Described) -> str | None:
    """What is odd about the layers of a model, by one pass through them without weights; None: nothing."""
    import torch
    from transformers import AutoModelForCausalLM

    from evictbench.cache import probe
    from evictbench.cache.attention import Unsupported

    config = copy.deepcopy(described.config)
    config._experts_implementation = "batched_mm"  # the others look at numbers
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        probe.check_layers(model)
    except Unsupported as error:
        return error.reason
    except NotImplementedError:  # an operation that needs numbers: `check_layers` looks at the model once it has them
        return None
    except Exception as error:
        if "meta tensor" in str(error) and not isinstance(error, UserError):  # the same
            return None
        return f"it cannot be built and read one token ({type(error).__name__}: {first_line(error)})"
    return None


def first_line(error: Exception) -> str:
    """What an error says, in one line of at most 160 characters, without its last full stop."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:160].rstrip(". ")


def _is_built_in(config: PretrainedConfig) -> bool:
    """Whether transformers itself has the model's code."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def _check_model_class(config: PretrainedConfig) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.model_type in ENCODER_TYPES
    if encoder and not getattr(config, "is_decoder", False):
        raise _refusal(config.model_type, "it is an encoder")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_attention_interface(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config.model_type)
    elif "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        raise _refusal(config.model_type, "it is not a causal language model")


def _ranges(layers: list[int]) -> str:
    """[0, 1, 2, 4, 6] as "layers 0-2, 4, 6"; more than eight ranges are shortened."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], layer]
        else:
            runs.append([layer])
    texts = ["-".join(map(str, run)) for run in runs]
    if len(texts) > 8:
        texts = [*texts[:6], "...", texts[-1]]
    return ("layer " if len(layers) == 1 else "layers ") + ", ".join(texts)


def _refusal(kind: str, reason: str) -> UserError:
    return UserError(
        f"This model ({kind}) cannot be measured: {reason}. Only plain softmax attention with keys and "
        "values per head is supported."
    )
