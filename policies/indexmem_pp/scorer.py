"""IndexMem++'s scorer: it gives an entry a score, and a rate at which the score falls, from its token's hidden state.

There is one small network for each layer, float32; it reads the input of the layer's attention (`normed_hidden`). Both
numbers are computed once, when the token enters. At a query `distance` positions later the score is `effective(...)`.
After the authors' code (Chooovy/kvpress, indexmem/scorer.py). Deviation: they run it in the model's dtype, with norms
in float32; here all of it is float32, so that ties and ranks do not depend on how the model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.policy import ModelShape

RATE_LENGTH = 16_384
"""The distance over which a score falls by its rate, in positions."""

POSITION_SLOPE = 1e-6
"""Added to a score for each position, so that among equals later entries rank slightly higher."""

FIRST_RATE = -1.0
"""The rate of every key before training."""

EPSILON = 1e-5
"""The epsilon of both norms."""


class Scorer(nn.Module):
    """The scorer of one layer: LayerNorm, Linear(hidden, width), LayerNorm, GELU, then for each KV head one number for
    the score and one for the rate.

    gate_scale `[1]`: multiplies scores in the training gate. It changes no ranking, so that inference ignores it.
    """

    def __init__(self, hidden: int, width: int, kv_heads: int) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(hidden, eps=EPSILON)
        self.narrow = nn.Linear(hidden, width, bias=False)
        self.width_norm = nn.LayerNorm(width, eps=EPSILON)
        self.to_score = nn.Linear(width, kv_heads, bias=False)
        self.to_rate = nn.Linear(width, kv_heads)
        self.gate_scale = nn.Parameter(torch.ones(1))
        nn.init.zeros_(self.to_rate.weight)
        nn.init.constant_(self.to_rate.bias, math.log(math.expm1(-FIRST_RATE)))

    def forward(self, normed_hidden: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The scores and rates (at most 0), each `[rows, kv_heads, S]` in the dtype of the weights (float32).

        normed_hidden: `[rows, S, hidden]`, any floating dtype. positions: `[rows, S]`; None: 0 to S - 1.
        """
        with torch.autocast(normed_hidden.device.type, enabled=False):
            inner = self.narrow(self.input_norm(normed_hidden.to(self.narrow.weight.dtype)))
            inner = F.gelu(self.width_norm(inner))
            score, rate = self.to_score(inner), -F.softplus(self.to_rate(inner))
        if positions is None:
            positions = torch.arange(score.shape[1], device=score.device)[None]
        score = score + POSITION_SLOPE * positions[..., None].to(score.dtype)
        return score.transpose(1, 2), rate.transpose(1, 2)


def effective(score: Tensor, rate: Tensor, distance: Tensor) -> Tensor:
    """The scores of entries for a query `distance` positions after them; all shapes broadcast together."""
    return score + rate * (distance / RATE_LENGTH)


def scorers(tensors: Mapping[str, Tensor], shape: ModelShape, origin: str = "") -> list[Scorer]:
    """The scorers of all layers, float32 and frozen, from tensors `[layers, ...]` named as a `Scorer`'s parameters.

    origin: the name of the weights in an error. Raises UserError where names or shapes do not fit.
    """
    subject = f"The weights {origin}" if origin else "The weights"
    narrow = tensors.get("narrow.weight")
    if narrow is None or narrow.dim() != 3:
        raise UserError(f"{subject} hold no scorer of IndexMem++: narrow.weight [layers, width, hidden] is missing.")
    width, hidden = narrow.shape[1:]
    if shape.hidden_size and hidden != shape.hidden_size:
        raise UserError(f"{subject} read hidden states of width {hidden}, and this model's have {shape.hidden_size}.")
    with torch.device("meta"):
        model = Scorer(hidden, width, shape.kv_heads)
    expected = {name: (shape.layers, *tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise UserError(
                f"{subject} do not fit: {name} is {given.get(name, 'missing')}, and {expected.get(name, 'nothing')} is "
                "expected."
            )
    result = []
    for layer in range(shape.layers):
        scorer = Scorer(hidden, width, shape.kv_heads)
        scorer.load_state_dict({name: tensor[layer].float() for name, tensor in tensors.items()})
        result.append(scorer.requires_grad_(False))
    return result
