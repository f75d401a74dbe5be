"""DMS's gates: they decide, for each token and KV head, whether the token before it is evicted.

Both give a logit z, and the decision is z > threshold (0 as published). The logit read at token t + 1 governs token t
(Łańcucki et al., arXiv 2506.05345, and the authors' training and inference code); `governing` makes that shift for a
whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SCALE = 100.0
OFFSET = 5.0
"""z = SCALE · x - OFFSET: at x = 0, where training starts, nothing is evicted, and small weights decide much. The
defaults of the authors' configuration (`dms_alpha_scale`, `dms_initial_alpha_offset`)."""


def logits(raw: Tensor, scale: float = SCALE, offset: float = OFFSET) -> Tensor:
    """The logits z, float32 or wider. raw: the number that a gate reads, of any shape."""
    return scale * _wide(raw) - offset


def governing(z: Tensor) -> Tensor:
    """The logit that governs each token, `[..., tokens]`: the next token's, and 0 for the last token.

    z: `[..., tokens]`, as read. The last token lies inside any window, so that its 0 decides nothing.
    """
    import torch

    return torch.cat([z[..., 1:], torch.zeros_like(z[..., :1])], dim=-1)


@dataclass(frozen=True)
class SeparateGate:
    """A gate beside a frozen model: RMSNorm of a layer's input, then one row of weights for each KV head.

    weight `[layers, kv_heads, hidden]`, bias `[layers, kv_heads]`, float32 or wider; training starts at zero. The norm
    has no gain, because the weight holds it. Deviation from the authors' code: the bias, which it does not have, so
    that a gate trained on standardised inputs can be written as one on the inputs themselves.
    """

    weight: Tensor
    bias: Tensor
    epsilon: float = 1e-6

    def logits(self, layer: int, hidden: Tensor) -> Tensor:
        """z `[rows, kv_heads, tokens]` from the layer's input `[rows, tokens, hidden]`."""
        from torch.nn.functional import linear

        weight, bias = self.weight[layer].to(hidden.device), self.bias[layer].to(hidden.device)
        normed = normalised(hidden, self.epsilon).to(weight.dtype)
        return logits(linear(normed, weight, bias)).transpose(1, 2)

    def logits_of_layers(self, layers: Sequence[int], hidden: Tensor) -> Tensor:
        """z `[layers, rows, kv_heads, tokens]` from the inputs of several layers, `[layers, rows, tokens, hidden]`, on
        the gate's device."""
        import torch

        weight, bias = self.weight, self.bias
        if len(layers) < weight.shape[0]:
            weight, bias = weight[list(layers)], bias[list(layers)]
        normed = normalised(hidden, self.epsilon).to(weight.dtype)
        raw = torch.baddbmm(bias[:, None], normed.flatten(1, 2), weight.transpose(1, 2))
        return logits(raw.unflatten(1, normed.shape[1:3])).transpose(2, 3)


@dataclass(frozen=True)
class BorrowedGate:
    """A gate inside the queries: the last channel of the first query head of each KV head's group.

    It is read after the query norm and before rotation. The model was trained to work without that channel, which is
    zeroed before the rotation and, because that mixes channels, again after it (`without_channel`). The group's other
    heads and all keys keep theirs. shared: all heads of a layer follow the decision of its first KV head. scale,
    offset: as of `logits`.
    """

    kv_heads: int
    shared: bool = False
    scale: float = SCALE
    offset: float = OFFSET

    def logits(self, queries: Tensor) -> Tensor:
        """z `[rows, kv_heads, tokens]` from queries `[rows, tokens, heads, head_dim]`, before rotation."""
        group = queries.shape[2] // self.kv_heads
        z = logits(queries[:, :, ::group, -1], self.scale, self.offset).transpose(1, 2)
        return z[:, :1].expand_as(z) if self.shared else z

    def without_channel(self, queries: Tensor, heads_at: int) -> Tensor:
        """A copy of the queries with the borrowed channel zeroed. heads_at: the dimension that runs over the heads.

        queries: `[rows, tokens, heads, head_dim]` with heads_at 2 before rotation, `[rows, heads, tokens, head_dim]`
        with heads_at 1 after it.
        """
        group = queries.shape[heads_at] // self.kv_heads
        changed = queries.clone()
        changed.movedim(heads_at, 0)[::group, ..., -1] = 0
        return changed


def normalised(hidden: Tensor, epsilon: float) -> Tensor:
    """Hidden states `[.., hidden]` after an RMSNorm without a gain, float32 or wider. epsilon: of the norm."""
    hidden = _wide(hidden)
    return hidden * (hidden.square().mean(-1, keepdim=True) + epsilon).rsqrt()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()
