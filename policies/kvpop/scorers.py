"""KVpop's scorers: they predict a token's future attention from its key, its value and the tokens after it.

There is one network for each KV head, and all heads are computed at once: parameters are `[heads, ...]`, where heads
runs over the KV heads of one or several layers. Inputs are un-rotated keys and values, standardised channel by channel
with statistics of the training texts (`shift`, `scale`, not trained). All is float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evictbench.errors import UserError

from . import mlstm

FORGET_BIAS = 4.0
"""The forget gate's bias before training: a memory of about 50 tokens."""

NORM_EPSILON = 1e-5
"""Added to the variance in the head norm."""


def normal(*shape: int, fan_in: int) -> nn.Parameter:
    """A parameter `shape` of normal values with variance 1 / fan_in."""
    return nn.Parameter(torch.randn(shape) / fan_in**0.5)


def by_head(inputs: Tensor, weight: Tensor) -> Tensor:
    """Inputs `[rows, heads, S, in]` times each head's weight `[heads, in, out]`: `[rows, heads, S, out]`. All rows are
    in one product, because a weight that is broadcast over rows is copied for each of them."""
    rows, heads, length, width = inputs.shape
    if rows == 1:
        return torch.matmul(inputs, weight)
    flat = inputs.transpose(0, 1).reshape(heads, rows * length, width)
    return (flat @ weight).view(heads, rows, length, weight.shape[-1]).transpose(0, 1)


class MLPScorer(nn.Module):
    """KVpop_mlp (arXiv 2607.05061 v2): `r = w2 · SiLU(W1 z + b1) + b2`. hidden: the width, which is ours. head_norm:
    not used."""

    def __init__(self, heads: int, head_dim: int, hidden: int, head_norm: bool = False) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("shift", torch.zeros(heads, 2 * head_dim))
        self.register_buffer("scale", torch.ones(heads, 2 * head_dim))
        self.w1 = normal(heads, self.inputs, hidden, fan_in=self.inputs)
        self.b1 = nn.Parameter(torch.zeros(heads, hidden))
        self.w2 = normal(heads, hidden, fan_in=hidden)
        self.b2 = nn.Parameter(torch.zeros(heads))

    shift: Tensor
    scale: Tensor

    @property
    def inputs(self) -> int:
        """How many inputs the two layers have."""
        return 2 * self.head_dim

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], heads: int, head_dim: int, origin: str) -> Self:
        """A scorer of these tensors, by name, without gradients. UserError, which names origin: they do not fit."""
        hidden = tensors["b1"].shape[-1] if "b1" in tensors else 0
        scorer = cls(heads, head_dim, hidden, "norm" in tensors)
        expected = {name: tuple(tensor.shape) for name, tensor in scorer.state_dict().items()}
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name in sorted(expected.keys() | given.keys()):
            if expected.get(name) != given.get(name):
                raise UserError(
                    f"The weights {origin} do not fit: {name} is {given.get(name, 'missing')}, and "
                    f"{expected.get(name, 'nothing')} is expected."
                )
        scorer.load_state_dict(dict(tensors))
        return scorer.requires_grad_(False)

    def part(self, heads: slice, device: torch.device) -> Self:
        """The scorer of some of the heads, on a device."""
        tensors = {name: tensor[heads] for name, tensor in self.state_dict().items()}
        return type(self).of(tensors, tensors["b2"].shape[0], self.head_dim, "part").to(device)

    def standardise(self, keys: Tensor, values: Tensor) -> Tensor:
        """The inputs z, `[rows, heads, S, 2 · head_dim]`, of keys and values `[rows, heads, S, head_dim]`."""
        features = torch.cat([keys, values], dim=-1).to(self.shift.dtype)
        return (features - self.shift[:, None]) * self.scale[:, None]

    def measure(self, samples: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Set shift and scale from keys and values `[rows, heads, S, head_dim]` of some texts."""
        count, total, square = 0, torch.zeros_like(self.shift), torch.zeros_like(self.shift)
        for keys, values in samples:
            features = torch.cat([keys.float(), values.float()], dim=-1)
            count += features.shape[0] * features.shape[2]
            total += features.sum((0, 2))
            square += features.square().sum((0, 2))
        if count:
            mean = total / count
            deviation = (square / count - mean.square()).clamp(min=0).sqrt()
            self.shift.copy_(mean)
            self.scale.copy_(1 / deviation.clamp(min=1e-4))

    def two_layers(self, inputs: Tensor) -> Tensor:
        """Scores `[rows, heads, S]` of inputs `[rows, heads, S, inputs]`."""
        hidden = F.silu(by_head(inputs, self.w1) + self.b1[:, None])
        return by_head(hidden, self.w2[..., None])[..., 0] + self.b2[:, None]

    def forward(self, keys: Tensor, values: Tensor, window: int = 0) -> Tensor:
        """Scores `[rows, heads, S]` of un-rotated keys and values `[rows, heads, S, head_dim]`, which get no gradient.
        window: not used."""
        return self.two_layers(self.standardise(keys.detach(), values.detach()))


class MLSTMScorer(MLPScorer):
    """KVpop (arXiv 2607.05061 v2): `r = w2 · SiLU(W1 [z ; h] + b1) + b2`. h is the answer of an mLSTM over keys and
    values to a feature of the token, read when the token leaves the window.

    The paper gives neither gates nor dimensions. Ours: key feature `z[:head_dim] / sqrt(head_dim)`, value feature
    `z[head_dim:]`, query `Wq z`, gates linear in z, input gate exponential, forget gate a sigmoid; one
    head_dim x head_dim memory per KV head. A token's answer is read after `window - 1` more tokens, because the cache
    evicts before the next one is known.

    head_norm: h is normalised over head_dim, head by head, and scaled by a learned `norm` `[heads, head_dim]`, as in
    xLSTM's blocks (arXiv 2405.04517); without it the two layers get the answer as `mlstm` gives it. The read-out is
    xLSTM's in both cases, `C q / max(|n · q|, 1)`: the products in n · q have both signs and can cancel, so that an
    answer is up to as large as all that was written, and the norm takes that scale out.
    """

    def __init__(self, heads: int, head_dim: int, hidden: int, head_norm: bool = False) -> None:
        super().__init__(heads, head_dim, hidden)
        self.register_parameter("norm", nn.Parameter(torch.ones(heads, head_dim)) if head_norm else None)
        self.wq = normal(heads, 2 * head_dim, head_dim, fan_in=2 * head_dim)
        self.gates = nn.Parameter(torch.zeros(heads, 2 * head_dim, 2))
        self.gate_bias = nn.Parameter(torch.tensor([0.0, FORGET_BIAS]).repeat(heads, 1))

    norm: nn.Parameter | None

    @property
    def inputs(self) -> int:
        """How many inputs the two layers have."""
        return 3 * self.head_dim

    def score_answered(self, z: Tensor, answer: Tensor) -> Tensor:
        """Scores `[rows, heads, S]` of tokens z `[rows, heads, S, 2d]` with the answers `[rows, heads, S, d]`."""
        if self.norm is not None:
            answer = F.layer_norm(answer, (self.head_dim,), eps=NORM_EPSILON) * self.norm[:, None]
        return self.two_layers(torch.cat([z, answer], dim=-1))

    def write_features(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Key feature, value feature, input gate's exponent and log of the forget gate. z: `[rows, heads, S, 2d]`."""
        gates = by_head(z, self.gates) + self.gate_bias[:, None]
        key, value = z.split(self.head_dim, dim=-1)
        return key / self.head_dim**0.5, value, gates[..., 0], F.logsigmoid(gates[..., 1])

    def forward(self, keys: Tensor, values: Tensor, window: int = 0) -> Tensor:
        """Scores `[rows, heads, S]` of un-rotated keys and values `[rows, heads, S, head_dim]`, which get no gradient.
        The answers for tokens that are in the window at the text's end are read after its last token."""
        z = self.standardise(keys.detach(), values.detach())
        rows, heads, length, _ = z.shape
        key, value, input_gate, log_forget = self.write_features(z)
        state = mlstm.empty_state((rows, heads), self.head_dim, z.device, z.dtype)
        query = by_head(z, self.wq)
        behind = max(0, window - 1)
        # The answer for token t is read after token t + behind.
        shifted = F.pad(query, (0, 0, min(behind, length), 0))[:, :, :length]
        answer, state = mlstm.chunked(state, key, value, input_gate, log_forget, shifted)
        answer = answer[:, :, behind:]
        if answer.shape[2] < length:
            rest = query[:, :, answer.shape[2] :]
            last = mlstm.State(*(part[:, :, None] for part in state))
            answer = torch.cat([answer, mlstm.read(last, rest)], dim=2)
        return self.score_answered(z, answer)


SCORERS: dict[str, type[MLPScorer]] = {"mlp": MLPScorer, "mlstm": MLSTMScorer}
"""The scorers by the name that weights carry."""
