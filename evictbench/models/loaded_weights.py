"""Whether the weights of a model that was just loaded fit it: none missing, mis-shaped, left over or not finite."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.models.safetensors_files import StoredTensor

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_NAMES_SHOWN = 5
_LAYER = re.compile(r"(.*\.)?(layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class UnusedTensors:
    """Tensors in the files that the model has no place for, and that it runs without: another tower, say.

    count: how many. first: the names of the first few. names: all of them, where they are known.
    """

    count: int
    first: tuple[str, ...]
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str]) -> UnusedTensors | None:
        """The tensors of these names; None: there are none."""
        ordered = tuple(sorted(names))
        return cls(len(ordered), ordered[:_NAMES_SHOWN], ordered) if ordered else None

    def without(self, read: Collection[str]) -> UnusedTensors | None:
        """The tensors but for those that something else than the model has read; None: nothing is left."""
        return UnusedTensors.of(set(self.names) - set(read)) if read else self

    @property
    def sentence(self) -> str:
        """For the user."""
        more = ", ..." if self.count > len(self.first) else ""
        return (
            f"The model has no place for {self.count} of the tensors in its files and runs without them: "
            f"{', '.join(self.first)}{more}."
        )

    @property
    def record(self) -> dict[str, Any]:
        """For run.json."""
        return {"count": self.count, "first": list(self.first)}


def check_loaded(
    model: PreTrainedModel, info: Mapping[str, Any], stored: Mapping[str, StoredTensor], name: str
) -> UnusedTensors | None:
    """Check a model against what transformers says about its loading, and against the files.

    info: of `output_loading_info`. stored: the tensors in the files. name: the model's, in sentences. Returns what was
    left over. Raises UserError for tensors that are missing, mis-shaped, stored as integers or not finite, and for
    left-over ones that belong to the layers that the model computes.
    """
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UserError(
            f"The weights of {name} are incomplete: {len(missing)} tensors are missing, {missing[0]} first."
        )
    if info["mismatched_keys"]:
        tensor, found, wanted = min(info["mismatched_keys"])
        raise UserError(
            f"The weights of {name} do not fit its config.json: {tensor} is {_shape(found)}{_in_file(stored, tensor)}, "
            f"and {_shape(wanted)} is expected."
        )
    if info["error_msgs"]:
        raise UserError(f"The weights of {name} cannot be loaded: {' '.join(str(info['error_msgs'][0]).split())[:300]}")
    unused = info["unexpected_keys"]
    _refuse_own(model, sorted(unused), name)
    _refuse_integers(model, stored, name)
    check_finite(model.state_dict().items(), f"The weights of {name}", stored)
    return UnusedTensors.of(unused)


def check_finite(
    tensors: Iterable[tuple[str, torch.Tensor]], subject: str, stored: Mapping[str, StoredTensor] | None = None
) -> None:
    """Raise UserError for a tensor with an entry that is NaN or infinite. One wait for the device, whatever their
    number. subject: the sentence's beginning ("The weights of x")."""
    import torch

    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    plain = (torch.Tensor, torch.nn.Parameter)  # those of quantised layers have classes of their own
    named = [(name, it) for name, it in tensors if type(it) in plain and it.dtype in dtypes and it.numel()]
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        if tensor.device.type != "meta":
            # NaN goes through to the extremes. This holds no mask, and takes a tenth of the time of `isfinite`.
            ends = torch.stack(tensor.detach().aminmax()).isfinite().all()
            by_device.setdefault(tensor.device, []).append((name, ends))
    for checks in by_device.values():
        finite = torch.stack([check for _, check in checks]).tolist()
        bad = [name for (name, _), good in zip(checks, finite, strict=True) if not good]
        if bad:
            dtype = str(dict(named)[bad[0]].dtype).removeprefix("torch.")
            raise UserError(
                f"{subject} are not finite in {dtype}: NaN or infinite numbers in {len(bad)} of {len(named)} tensors, "
                f"{bad[0]}{_in_file(stored or {}, bad[0])} first."
            )


def _refuse_own(model: PreTrainedModel, unused: Collection[str], name: str) -> None:
    """Refuse left-over tensors without which the model is another than the one that was saved: a weight or bias of a
    module that it has, and layers past its last one, unless they are there to predict further tokens."""
    text: Any = model.config.get_text_config(decoder=True)
    layers = getattr(text, "num_hidden_layers", None)
    ahead = getattr(text, "num_nextn_predict_layers", None) or getattr(text, "mtp_num_hidden_layers", None) or 0
    modules = dict(model.named_modules())
    for tensor in unused:
        parent, _, leaf = tensor.rpartition(".")
        module = modules.get(parent)
        buffers = {} if module is None else dict(module.named_buffers(recurse=False))
        if leaf in ("weight", "bias") and hasattr(module, leaf) and leaf not in buffers:
            raise UserError(
                f"The weights of {name} do not fit its config.json: they have {tensor}, and the config makes a model "
                "without it."
            )
        place = _LAYER.match(tensor)
        if place and isinstance(layers, int) and (place[1] or "") + place[2] in modules:
            number = int(place[3])
            if number >= layers + ahead:
                raise UserError(
                    f"The weights of {name} do not fit its config.json: they have {tensor}, and the config makes "
                    f"{layers} layers (num_hidden_layers)."
                )


def _refuse_integers(model: PreTrainedModel, stored: Mapping[str, StoredTensor], name: str) -> None:
    if getattr(model.config, "quantization_config", None) is not None:
        return
    for parameter, _ in model.named_parameters():
        tensor = stored.get(parameter)
        if tensor is not None and tensor.integer:
            raise UserError(
                f"The weights of {name} are not numbers that a model computes with: {parameter} is stored as "
                f"{tensor.dtype} in {tensor.file}, and config.json names no quantisation."
            )


def _in_file(stored: Mapping[str, StoredTensor], tensor: str) -> str:
    return f" in {stored[tensor].file}" if tensor in stored else ""


def _shape(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
