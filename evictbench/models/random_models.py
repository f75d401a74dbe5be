"""Models of random weights in published sizes, made on the device, with nothing to download.

Speed and memory depend on sizes and not on the values of weights, so that a trace needs no checkpoint. What such a
model writes means nothing, and it has no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError, unknown

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PREFIX = "shape:"
"""What the name of such a model begins with."""

SHARE = 0.9
"""Share of a device's memory that weights may fill."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a published model. parameters: how many, tied ones counted once. sizes: those of config.json."""

    model_type: str
    parameters: int
    dtype: str
    sizes: Mapping[str, Any]

    def config(self) -> PretrainedConfig:
        """The config of transformers."""
        from transformers import CONFIG_MAPPING

        config: PretrainedConfig = CONFIG_MAPPING[self.model_type](**self.sizes, dtype=self.dtype)
        return config


def _sizes(
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    theta: float,
    window: int,
    epsilon: float,
    rope: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, **(rope or {})},
        "max_position_embeddings": window,
        "rms_norm_eps": epsilon,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | more


_LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN3: dict[str, Any] = {"head_dim": 128, "window": 40960, "epsilon": 1e-6}

SHAPES = {
    "qwen3-4b": Shape(
        "qwen3",
        4_022_468_096,
        "bfloat16",
        _sizes(151936, 2560, 9728, 36, 32, 8, 1e6, **_QWEN3 | {"tie_word_embeddings": True}),
    ),
    "qwen3-8b": Shape("qwen3", 8_190_735_360, "bfloat16", _sizes(151936, 4096, 12288, 36, 32, 8, 1e6, **_QWEN3)),
    "llama-3.1-8b": Shape(
        "llama",
        8_030_261_248,
        "bfloat16",
        _sizes(128256, 4096, 14336, 32, 32, 8, 5e5, window=131072, epsilon=1e-5, rope=_LLAMA_31_ROPE),
    ),
    "mistral-7b": Shape(  # version 0.3, which has no sliding window
        "mistral",
        7_248_023_552,
        "bfloat16",
        _sizes(32768, 4096, 14336, 32, 32, 8, 1e6, window=32768, epsilon=1e-5, sliding_window=None),
    ),
    "smollm2-135m": Shape(
        "llama",
        134_515_008,
        "bfloat16",
        _sizes(49152, 576, 1536, 30, 9, 3, 1e5, window=8192, epsilon=1e-5, tie_word_embeddings=True),
    ),
}
"""Sizes from the config.json of Qwen/Qwen3-4B and Qwen/Qwen3-8B, meta-llama/Llama-3.1-8B,
mistralai/Mistral-7B-v0.3 and HuggingFaceTB/SmolLM2-135M."""


def is_shape(name: str) -> bool:
    """Whether a `--model` names a shape."""
    return name.startswith(PREFIX)


def find_shape(name: str) -> Shape:
    """The shape that a name like "shape:qwen3-8b" stands for; UserError for one that is not known."""
    key = name.removeprefix(PREFIX).lower()
    if key not in SHAPES:
        raise unknown("shape", key, SHAPES)
    return SHAPES[key]


def resolve_device(device: str) -> str:
    """The one device of a model of random weights. "auto" is the first GPU, or the CPU where there is none."""
    import torch

    from evictbench.models.devices import SPREAD, check_device

    if device in SPREAD:
        raise UserError(f"A named shape lies on one device, and --device {device} spreads a model: say auto or cuda:N.")
    check_device(device)
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    return device


def check_room(shape: Shape, name: str, device: str, dtype: str) -> None:
    """Raise UserError where the weights alone take more than the device has."""
    import torch

    if torch.device(device).type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        import psutil

        room = psutil.virtual_memory().available
    needed = shape.parameters * getattr(torch, dtype).itemsize
    if needed > SHARE * room:
        raise UserError(
            f"The weights of {name} take {needed / 2**30:.1f} GiB in {dtype}, and {device} has {room / 2**30:.1f} GiB: "
            "choose a smaller shape, a smaller dtype, or another --device."
        )


def build(shape: Shape, device: str, dtype: str, seed: int) -> PreTrainedModel:
    """The model with random weights, made on its device, in eval mode."""
    import torch
    from transformers import AutoModelForCausalLM

    devices = [] if device == "cpu" else [torch.device(device)]
    try:
        with torch.random.fork_rng(devices=devices), torch.device(device):
            torch.manual_seed(seed)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(shape.config(), dtype=getattr(torch, dtype))
    except torch.OutOfMemoryError as error:
        raise UserError(f"The weights do not fit on {device}: {error}") from error
    built: PreTrainedModel = model.eval()
    return built
