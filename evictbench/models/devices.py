"""The device of a model's weights: one GPU, all GPUs, or the CPU; decided from their size, before loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PretrainedConfig, PreTrainedModel

    from evictbench.models.safetensors_files import StoredTensor

SPREAD = ("balanced", "sequential")
"""Values of --device that spread one model's layers over all GPUs, as accelerate names them."""

WEIGHTS_SHARE = 0.7
"""Share of one GPU's memory that weights may fill before `auto` spreads them: the rest is for caches."""


def check_device(device: str) -> None:
    """Raise UserError for a device that does not exist, or is not on this machine."""
    import torch

    if device == "auto":
        return
    if device in SPREAD:
        if not torch.cuda.is_available():
            raise UserError(f"--device {device} spreads a model over GPUs, and torch sees none here.")
        return
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise UserError(
            f"There is no device {device!r}: say auto, cpu, cuda, cuda:N, mps, {' or '.join(SPREAD)}."
        ) from error
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device} needs a CUDA GPU, and torch {torch.__version__} sees none here.")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise UserError(f"There is no {device}: torch sees {torch.cuda.device_count()} GPU(s), from cuda:0 on.")
    if parsed.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps needs an Apple GPU, and torch sees none here.")
    if parsed.type not in {"cpu", "cuda", "mps"}:
        raise UserError(f"The device {device} cannot be used: say auto, cpu, cuda, cuda:N or mps.")


def device_map(
    device: str, tensors: Iterable[StoredTensor], config: PretrainedConfig, dtype: str
) -> str | dict[str, str] | None:
    """The `device_map` with which transformers loads these tensors; None is the CPU.

    "auto" is one GPU if the weights fill no more than WEIGHTS_SHARE of it, else all GPUs, else the CPU.
    """
    import torch

    if device in SPREAD:
        return device
    if device != "auto":
        return None if device == "cpu" else {"": device}
    if not torch.cuda.is_available():
        return None
    gpus = range(torch.cuda.device_count())
    memory = [torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus]
    return gpu_map(weight_bytes(tensors, config, dtype), memory)


def gpu_map(weights: int, gpus: list[int]) -> str | dict[str, str]:
    """The device map of "auto". weights: their bytes. gpus: the bytes of each GPU.

    Raises UserError where all GPUs together are too small: layers parked in main memory would be measured as
    slowness of the policy.
    """
    usable = 0.9 * sum(gpus)
    if len(gpus) > 1 and WEIGHTS_SHARE * gpus[0] < weights <= usable:
        return "auto"
    if weights <= 0.9 * gpus[0]:
        return {"": "cuda:0"}
    raise UserError(
        f"The weights take {weights / 2**30:.1f} GiB, and the GPUs have room for {usable / 2**30:.1f} GiB: "
        "choose a smaller dtype, more GPUs, or --device cpu."
    )


def refuse_offloading(model: PreTrainedModel, name: str) -> None:
    """Raise UserError if accelerate parked layers of a spread model in main memory or on disk."""
    layers = getattr(model, "hf_device_map", None) or {}
    if len(set(layers.values())) > 1 and {"cpu", "disk"} & {str(device) for device in layers.values()}:
        raise UserError(f"The GPUs have no room for all of {name}: choose a smaller dtype, more GPUs, or --device cpu.")


def weight_bytes(tensors: Iterable[StoredTensor], config: PretrainedConfig, dtype: str) -> int:
    """Bytes that the weights will take in `dtype`; as stored where they are quantised, or no dtype is named."""
    import torch

    wanted: Any = config.dtype if dtype == "auto" else dtype
    if wanted is None or getattr(config, "quantization_config", None):
        return sum(tensor.nbytes for tensor in tensors)
    itemsize = (getattr(torch, wanted) if isinstance(wanted, str) else wanted).itemsize
    return int(sum(tensor.elements for tensor in tensors) * itemsize)
