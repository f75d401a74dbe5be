"""Linear layers on the CPU with their weights in oneDNN's own order, laid out once when a model is loaded.

torch's `linear` lays a weight out anew in every call, which at a few rows takes longer than the product. Packing makes
a decode step of one row about twice as fast, and of eight rows more than that (`python -m benchmarks.limit`). A row's
result does not depend on how many rows are beside it; it differs from `linear`'s by the order of summation alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def packed_dtypes() -> frozenset[torch.dtype]:
    """The dtypes that this processor can pack: float32, and bfloat16 where oneDNN has instructions for it."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return frozenset({torch.float32, torch.bfloat16})
    return frozenset({torch.float32})


class PackedLinear(nn.Linear):
    """A linear layer with a second, packed copy of its weight for passes that need no gradient.

    A weight that was changed, moved or replaced since it was packed is used unpacked.
    """

    _packed: Tensor | None = None
    _packed_state: tuple[int, int] | None = None

    def pack(self) -> None:
        """Pack the weight as it is now."""
        with torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        self._packed_state = self._state()

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if (
            self._packed is None
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or self._packed_state != self._state()
            or input.dtype != self.weight.dtype
            or input.device.type != "cpu"
            or input.numel() == 0
        ):
            return F.linear(input, self.weight, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, self._packed, self.bias, "none", [], "")
        return product

    def _state(self) -> tuple[int, int]:
        return self.weight.data_ptr(), self.weight._version

    def __getstate__(self) -> dict[str, Any]:
        # A packed tensor can be neither copied nor pickled; a copy goes on with the weight itself.
        return {name: value for name, value in self.__dict__.items() if name not in ("_packed", "_packed_state")}


def pack_linears(model: nn.Module, spare_bytes: int) -> int:
    """Pack every plain linear layer on the CPU in one of `packed_dtypes`; returns the bytes of the packed copies.

    Nothing is packed if that takes more than `spare_bytes`, or if torch was built without oneDNN. Layers of a class of
    their own (quantised ones) or with an accelerate hook are left alone.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    dtypes = packed_dtypes()
    layers = [module for module in model.modules() if type(module) is nn.Linear and _packable(module, dtypes)]
    size = sum(module.weight.nbytes for module in layers)
    if size > spare_bytes:
        return 0
    for module in layers:
        module.__class__ = PackedLinear
        assert isinstance(module, PackedLinear)
        module.pack()
    return size


def _packable(module: nn.Linear, dtypes: frozenset[torch.dtype]) -> bool:
    weight = module.weight
    plain = type(weight) is nn.Parameter and not hasattr(module, "_hf_hook")
    return plain and weight.device.type == "cpu" and weight.dtype in dtypes
