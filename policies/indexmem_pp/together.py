"""The scorers of several layers at once: `scorer.Scorer` in a few products for all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from .scorer import EPSILON, POSITION_SLOPE


def score_layers(parameters: Mapping[str, Tensor], hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The scores and rates, each `[layers, rows, kv_heads, S]`, in the parameters' dtype.

    parameters: `[layers, ...]`, by a Scorer's names. hidden: `[layers, rows, S, hidden]`. positions: `[rows, S]`.
    """

    def normed(tensor: Tensor, name: str) -> Tensor:
        weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
        return F.layer_norm(tensor, weight.shape[1:], eps=EPSILON) * weight[:, None] + bias[:, None]

    inner = normed(hidden.to(parameters["narrow.weight"].dtype).flatten(1, 2), "input_norm")
    inner = F.gelu(normed(inner @ parameters["narrow.weight"].mT, "width_norm"))
    score = inner @ parameters["to_score.weight"].mT
    rate = -F.softplus(inner @ parameters["to_rate.weight"].mT + parameters["to_rate.bias"][:, None])
    score, rate = (part.unflatten(1, positions.shape).transpose(2, 3) for part in (score, rate))
    return score + POSITION_SLOPE * positions[:, None], rate
