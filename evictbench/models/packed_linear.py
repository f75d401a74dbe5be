"""Linear layers on the CPU with their weights in oneDNN's own order, laid out once when a model is loaded.

torch's `linear` lays a weight out anew in every call, which at a few rows takes longer than the product. It makes a
decode step of one row about twice as fast, of eight rows more than that (`python -m benchmarks.limit`). A row's result
does not depend on how many rows are beside it; it differs from `linear`'s by the order of summation alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKED_DTYPES = frozenset({torch.float32, torch.bfloat16})


class PackedLinear(nn.Linear):
    """A linear layer with a second copy of its weight, which serves what needs no gradient.

    A weight that has been changed, moved or replaced since it was packed is used as it is, unpacked.
    """

    _packed: Tensor | None = None
    _packed_of: tuple[int, int] | None = None

    def pack(self) -> None:
        """Lay the weight out as it is now."""
        with torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        self._packed_of = self._state()

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if (
            self._packed is None
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or self._packed_of != self._state()
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
        return {name: value for name, value in self.__dict__.items() if name not in ("_packed", "_packed_of")}


def pack_linears(model: nn.Module, spare_bytes: int) -> int:
    """Pack every plain linear layer on the CPU in float32 or bfloat16; the bytes that this takes.

    Nothing is packed if that takes more than `spare_bytes`, or if torch was built without oneDNN. Layers of a class of
    their own (quantised ones) or with an accelerate hook are left alone.
    """
    found = [module for module in model.modules() if type(module) is nn.Linear and _packable(module)]
    size = sum(module.weight.nbytes for module in found)
    if not torch.backends.mkldnn.is_available() or size > spare_bytes:
        return 0
    for module in found:
        module.__class__ = PackedLinear
        assert isinstance(module, PackedLinear)
        module.pack()
    return size


def _packable(module: nn.Linear) -> bool:
    weight = module.weight
    plain = type(weight) is nn.Parameter and not hasattr(module, "_hf_hook")
    return plain and weight.device.type == "cpu" and weight.dtype in PACKED_DTYPES
