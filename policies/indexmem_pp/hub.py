"""The authors' released gates as weights of this policy: how their names and constants map to ours.

Their hub repositories (marcusguhao/Qwen3-8B-gate-IndexMem and its like) hold one file of torch.save, in either of two
layouts of their code (Chooovy/kvpress): `indexer`, named `model.layers.N.self_attn.indexer.*` and with the options of
the training in `config`, as released; or `scorers`, named `N.*` and with `scorer_config`, as their converter and
their newer code write. Optimiser states beside them are not read. A checkpoint that was trained jointly with its model,
or that scores by another network or other constants, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy import ModelShape

_LAYERED = {
    "indexer": re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.(.+)"),
    "scorers": re.compile(r"(\d+)\.(.+)"),
}
"""By the name of the dictionary of tensors in a checkpoint: how its keys name layer and parameter."""

_OURS = {
    "in_norm.weight": "input_norm.weight",
    "in_norm.bias": "input_norm.bias",
    "w_in.weight": "narrow.weight",
    "mid_norm.weight": "width_norm.weight",
    "mid_norm.bias": "width_norm.bias",
    "w_out.weight": "to_score.weight",
    "w_decay.weight": "to_rate.weight",
    "w_decay.bias": "to_rate.bias",
    "gate_scale": "gate_scale",
}
"""Names of the parameters, as released and in `Scorer`."""

_NEWER = {"input_proj": "w_in", "magnitude_proj": "w_out", "retention_proj": "w_decay"}
"""Names in their newer code, and the ones as released."""

_CONSTANTS = {
    "scalar_pos_slope": 1e-6,
    "scalar_decay_ref": 16_384,
    "pos_slope": 1e-6,
    "age_scale": 16_384,
    "norm_eps": 1e-5,
}
"""Constants that the tensors do not show, with the values that `scorer` has."""

_KINDS = {"scorer": "scalar", "kind": "mlp"}
"""By the names that their options have for it: the value that means `scorer`'s network."""

_CONFIG = (
    "kind",
    "hidden_size",
    "n_heads",
    "mid_dim",
    "norm_eps",
    "pos_slope",
    "gate_scale",
    "decay",
    "age_scale",
    "decay_init",
)
"""The fields of `scorer_config` for an MLP, all of which their code requires (docs/checkpoints.md)."""

_CENTROIDS = 64
_NAMES_SHOWN = 4
"""Names in an error, at most."""


class Released:
    """How `evictbench.models.policy_weights` reads such a checkpoint: the policy's attribute `foreign`."""

    files: tuple[str, ...] = ("final.pt", "indexmem.pt")

    def read(self, file: Path, origin: str, shape: ModelShape) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors `[layers, ...]` float32 as `scorer.scorers` takes them, and the card.

        shape: of the model that they are to serve, for what a checkpoint leaves open. Raises UserError for a file that
        is no such checkpoint, for names that are missing or not known, and for a scorer that is another.
        """
        payload = _loaded(file, origin)
        kind = next((name for name in _LAYERED if isinstance(payload.get(name), Mapping)), None)
        if kind is None:
            raise UserError(
                f"The weights {origin} are no checkpoint of IndexMem++: {file.name} holds {_some(payload)}, and "
                f"neither {' nor '.join(_LAYERED)}."
            )
        options = _options(payload, kind)
        if "model" in payload or "backbone" in payload or options.get("joint"):
            raise UserError(
                f"The weights {origin} were trained together with their model, which they would not fit without: only "
                "gates beside a frozen model can be used."
            )
        _check(options, origin)
        if kind == "scorers":
            _check_config(payload.get("scorer_config"), origin)
        tensors = _stacked(_by_layer(payload[kind], kind, origin), origin)
        return tensors, _card(options, tensors, shape)


def _loaded(file: Path, origin: str) -> Mapping[str, Any]:
    import pickle

    import torch

    try:
        payload = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise UserError(
            f"The weights {origin} cannot be read: {file.name} is damaged, or no file of tensors and plain data that "
            "torch.save has written."
        ) from error
    return payload if isinstance(payload, Mapping) else {}


def _options(payload: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The options of the training, as far as the checkpoint has them; the scorer's own come before the others."""
    names = ("config",) if kind == "indexer" else ("source_config", "training_config", "scorer_config")
    options: dict[str, Any] = {}
    for name in names:
        if isinstance(payload.get(name), Mapping):
            options |= payload[name]
    return options


def _check(options: Mapping[str, Any], origin: str) -> None:
    for name, ours in _KINDS.items():
        if options.get(name) not in (None, ours):
            raise UserError(
                f"The weights {origin} are those of the scorer {options[name]!r}, and only {ours!r} is IndexMem++'s."
            )
    for name, number in _CONSTANTS.items():
        if options.get(name) is not None and abs(float(options[name]) - number) > 1e-9 * number:
            raise UserError(
                f"The weights {origin} were trained with {name} {options[name]:g}, and indexmem_pp scores with "
                f"{number:g}."
            )


def _check_config(config: Any, origin: str) -> None:
    """Refuse a scorer whose config is not whole: what it leaves out the tensors do not show."""
    config = config if isinstance(config, Mapping) else {}
    if missing := [name for name in _CONFIG if name not in config]:
        raise UserError(f"The weights {origin} have a scorer_config that lacks {_some(missing)}.")
    if unknown := [name for name in config if name not in _CONFIG]:
        raise UserError(f"The weights {origin} have a scorer_config with {_some(unknown)}, which no MLP scorer has.")


def _by_layer(named: Mapping[str, Tensor], kind: str, origin: str) -> dict[int, dict[str, Tensor]]:
    """Each layer's tensors under our names."""
    layers: dict[int, dict[str, Tensor]] = {}
    unread = []
    for name, tensor in named.items():
        match = _LAYERED[kind].fullmatch(name)
        first, dot, rest = (match[2] if match else "").partition(".")
        ours = _OURS.get(f"{_NEWER.get(first, first)}{dot}{rest}")
        if match is None or ours is None:
            unread.append(name)
        else:
            layers.setdefault(int(match[1]), {})[ours] = tensor
    if unread:
        raise UserError(f"The weights {origin} hold what IndexMem++'s scorer has no place for: {_some(unread)}.")
    return layers


def _stacked(layers: Mapping[int, Mapping[str, Tensor]], origin: str) -> dict[str, Tensor]:
    import torch

    missing = [
        f"{theirs} of layer {layer}"
        for layer in range(max(layers, default=0) + 1)
        for theirs, ours in _OURS.items()
        if ours not in layers.get(layer, {})
    ]
    if missing:
        raise UserError(f"The weights {origin} lack {_some(missing)}.")
    stacked = {}
    for theirs, ours in _OURS.items():
        tensors = [layers[layer][ours].float() for layer in range(len(layers))]
        if ours == "gate_scale":
            tensors = [tensor.reshape(-1) for tensor in tensors]
        if shapes := {tuple(tensor.shape) for tensor in tensors[1:]} - {tuple(tensors[0].shape)}:
            raise UserError(
                f"The weights {origin} have {theirs} in unequal shapes, {tuple(tensors[0].shape)} and {min(shapes)}."
            )
        stacked[ours] = torch.stack(tensors)
    return stacked


def _card(options: Mapping[str, Any], tensors: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Any]:
    """The card. Sinks and window are the training's where the checkpoint states them, else the authors' defaults."""
    layers, width, hidden = tensors["narrow.weight"].shape
    pinned = str(options.get("pin_mode") or "local+sink")
    sinks = options.get("n_sink", options.get("sink_size")) if "sink" in pinned else None
    window = options.get("n_local", options.get("window_size")) if "local" in pinned else None
    beta = options.get("gate_budget", options.get("gate_mass"))
    return {
        "policy": "indexmem_pp",
        "variant": "",
        "transferable": False,
        "base_model": {
            "name": str(options.get("model") or "a model that the checkpoint does not name"),
            "shape": {
                "layers": layers,
                "heads": shape.heads,
                "kv_heads": tensors["to_score.weight"].shape[1],
                "head_dim": shape.head_dim,
                "hidden_size": hidden,
            },
        },
        "settings": {
            "sinks": 4 if sinks is None else int(sinks),
            "window": 128 if window is None else int(window),
            "centroids": _CENTROIDS,
            "beta": beta,
            "width": width,
        },
        "notes": ["Read from a checkpoint of the authors' code, where scores are computed in the model's dtype."],
    }


def _some(names: Mapping[str, Any] | list[str]) -> str:
    """The first names, and how many more there are."""
    texts = [str(name) for name in names]
    shown = ", ".join(texts[:_NAMES_SHOWN]) or "nothing"
    return shown if len(texts) <= _NAMES_SHOWN else f"{shown} and {len(texts) - _NAMES_SHOWN} more"


RELEASED = Released()
