"""Checkpoints of models that were trained with DMS: the options in their config, and the adapters among their tensors.

The names and the defaults are those of the authors' code (NVIDIA/Model-Optimizer, experimental/dms). A checkpoint has a
borrowed channel, or with `dms_separate_alpha` an adapter in each layer, under `model.layers.N.self_attn`:
`dms_proj_alpha.weight` `[kv_heads, hidden]`, where the model's attention has biases also `dms_proj_alpha.bias`
`[kv_heads]`, and `dms_proj_alpha_norm.weight` `[hidden]`, the gain of an RMSNorm of the layer's input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from evictbench.errors import UserError

from .gate import OFFSET, SCALE

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy import ModelShape

PREFIX = "dms_"

_NAME = re.compile(r"(?:.+\.)?layers\.(\d+)\.self_attn\.dms_proj_alpha(_norm)?\.(weight|bias)")

_NAMES_SHOWN = 4
"""Names in an error, at most."""


@dataclass(frozen=True)
class Options:
    """What a checkpoint's config says about DMS.

    window: `dms_window_size`, a marked token at t is seen by queries up to t + window; None: the config names none.
    ratio: `dms_cr`, the compression ratio that it was trained for. separate: `dms_separate_alpha`, the gate is in
    adapters. per: `dms_alpha_per`. scale, offset: `dms_alpha_scale` and `dms_initial_alpha_offset`, of z = scale · x -
    offset.
    """

    window: int | None = None
    ratio: float | None = None
    separate: bool = False
    per: Literal["head", "layer"] = "head"
    scale: float = SCALE
    offset: float = OFFSET

    @classmethod
    def of(cls, config: Any) -> Options:
        """The options in a model's config, an object of transformers or the object in a config.json. UserError for a
        value that DMS cannot have."""
        mapping = config if isinstance(config, Mapping) else vars(config)
        window = _number(mapping, "dms_window_size", least=1)
        ratio = _number(mapping, "dms_cr", least=1)
        scale = _number(mapping, "dms_alpha_scale")
        offset = _number(mapping, "dms_initial_alpha_offset")
        per = mapping.get("dms_alpha_per") or "head"
        if per not in ("head", "layer"):
            raise UserError(f"The model's config has dms_alpha_per {per!r}: it is head or layer.")
        if window is not None and window != int(window):
            raise UserError(f"The model's config has dms_window_size {window:g}: it is a whole number.")
        if scale == 0:
            raise UserError("The model's config has dms_alpha_scale 0: then every token has one decision.")
        return cls(
            window=None if window is None else int(window),
            ratio=ratio,
            separate=bool(mapping.get("dms_separate_alpha", False)),
            per="layer" if per == "layer" else "head",
            scale=SCALE if scale is None else scale,
            offset=OFFSET if offset is None else offset,
        )


def _number(config: Mapping[str, Any], name: str, least: float | None = None) -> float | None:
    value = config.get(name)
    if value is None:
        return None
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or (least is not None and value < least):
        wanted = "a number" if least is None else f"a number of at least {least:g}"
        raise UserError(f"The model's config has {name} {value!r}: it is {wanted}.")
    return float(value)


class Adapters:
    """How `evictbench.models.policy_weights` reads a checkpoint's adapters: the policy's attribute `checkpoint`."""

    def owns(self, name: str) -> bool:
        """Whether a tensor of a checkpoint is DMS's."""
        return name.rpartition(".")[0].rpartition(".")[2].startswith(PREFIX)

    def read(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], origin: str, shape: ModelShape
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The separate gate's weight `[layers, kv_heads, hidden]` and bias `[layers, kv_heads]`, float32, and the card.

        tensors: those that `owns` names. config: the object in config.json. Gain, scale and offset of the checkpoint
        are folded into weight and bias, so that the gate's own scale and offset give the checkpoint's z. UserError for
        tensors that are missing, not known or of another shape.
        """
        import torch

        text = config.get("text_config") or config
        options = Options.of(text)
        layers = _by_layer(tensors, origin)
        _check_whole(layers, origin, shape)
        weights, biases = [], []
        for layer in range(shape.layers):
            own = layers[layer]
            kv_heads, hidden = own["weight"].shape
            bias = own.get("bias", torch.zeros(kv_heads))
            weights.append(own["weight"].double() * own["norm"].double() * (options.scale / SCALE))
            biases.append((bias.double() * options.scale - options.offset + OFFSET) / SCALE)
        card = {
            "policy": "dms",
            "variant": "",
            "transferable": False,
            "base_model": {
                "name": str(config.get("_name_or_path") or "a model that the checkpoint does not name"),
                "shape": {
                    "layers": len(layers),
                    "heads": shape.heads,
                    "kv_heads": kv_heads,
                    "head_dim": shape.head_dim,
                    "hidden_size": hidden,
                },
            },
            "gate": "separate",
            "epsilon": float(text.get("rms_norm_eps", 1e-6)),
            "window": options.window,
            "alpha_per": options.per,
            "ratio": options.ratio,
            "notes": ["Read from a checkpoint of the authors' code, which decides in the model's dtype."],
        }
        return {"weight": torch.stack(weights).float(), "bias": torch.stack(biases).float()}, card


def _by_layer(tensors: Mapping[str, Tensor], origin: str) -> dict[int, dict[str, Tensor]]:
    """Each layer's `weight`, `norm` and, where there is one, `bias`."""
    layers: dict[int, dict[str, Tensor]] = {}
    unknown = []
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or (match[2] and match[3] == "bias"):
            unknown.append(name)
        else:
            layers.setdefault(int(match[1]), {})["norm" if match[2] else match[3]] = tensor
    if unknown:
        raise UserError(f"The weights {origin} hold what DMS's adapters have no place for: {_some(unknown)}.")
    return layers


def _check_whole(layers: Mapping[int, Mapping[str, Tensor]], origin: str, shape: ModelShape) -> None:
    """Raise UserError where the layers are not those of the model, or lack a tensor, or have one of another shape."""
    if set(layers) != set(range(shape.layers)) and layers:
        raise UserError(
            f"The weights {origin} have adapters in {len(layers)} layers, up to layer {max(layers)}, and this "
            f"model has {shape.layers} layers."
        )
    missing = [
        f"dms_proj_alpha{'_norm' if name == 'norm' else ''}.weight of layer {layer}"
        for layer in range(shape.layers)
        for name in ("weight", "norm")
        if name not in layers.get(layer, {})
    ]
    if missing:
        raise UserError(f"The weights {origin} lack {_some(missing)}.")
    hidden = shape.hidden_size or layers[0]["norm"].shape[-1]
    for layer, own in layers.items():
        for name, expected in (("weight", (shape.kv_heads, hidden)), ("bias", (shape.kv_heads,)), ("norm", (hidden,))):
            found = tuple(own[name].shape) if name in own else expected
            if found != expected:
                raise UserError(
                    f"The weights {origin} have an adapter's {name} of shape {list(found)} in layer {layer}, and this "
                    f"model takes {list(expected)}."
                )


def _some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


ADAPTERS = Adapters()
