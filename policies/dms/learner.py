"""DMS's training: a gate learns what a frozen model can do without, by imitating the dense model.

After Łańcucki et al. (arXiv 2506.05345) and the authors' recipe for a frozen model (Model-Optimizer, experimental/dms):
beyond the window each key's logit gets the log-probability of not being evicted; the loss is the divergence from the
dense model plus the shortfall of the closed share (the share of tokens that the gate evicts) from its target, which
rises with the steps.

Deviations. The inputs of the gate are standardised per channel while it trains, on some training texts, and the
standardisation is folded into the weights that are saved: with a scale of 100 the widest channels would decide alone.
The closed share is counted over the tokens that leave the window within the text, not over all. The divergence is from
the teacher to the student unless `divergence="reverse"` (the authors' code: reverse, its comments: forward).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evictbench.cache.hooks import hooked
from evictbench.errors import UserError
from evictbench.policy.learner import Batch, Learner, Losses, Training, Visible
from evictbench.train.distillation import KEPT_TOKENS, divergence, last_hidden_state, recomputed
from evictbench.train.sparse_attention import attend_visible

from . import gate
from .calibration import calibration_table
from .recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.policy import ModelShape


class DMSLearner(Learner):
    """The separate gate of every layer, in training.

    weight `[layers, kv_heads, hidden]`, bias `[layers, kv_heads]`: trained, float32, zero at first. centre and scale
    `[layers, hidden]`: the standardisation of the normalised inputs, set by `begin`. The bias is multiplied by
    `constant`, the root of `hidden`, which is the length of all other inputs together: with 1 the bias would move a
    hundred times slower than the weights, and the closed share could hardly exceed a half.
    """

    held_out = 8
    centre: Tensor
    scale: Tensor

    def __init__(self, shape: ModelShape, training: Training) -> None:
        super().__init__()
        self.recipe: Recipe = training.recipe
        self.window = training.window
        self.epsilon = float(getattr(training.model, "rms_norm_eps", 1e-6))
        hidden = int(training.model.hidden_size)
        self.constant = hidden**0.5
        self.weight = nn.Parameter(torch.zeros(shape.layers, shape.kv_heads, hidden))
        self.bias = nn.Parameter(torch.zeros(shape.layers, shape.kv_heads))
        self.register_buffer("centre", torch.zeros(shape.layers, hidden))
        self.register_buffer("scale", torch.ones(shape.layers, hidden))

    @torch.no_grad()
    def begin(self, model: PreTrainedModel, blocks: Sequence[Tensor]) -> None:
        """Set centre and scale to the mean and the inverse spread of each channel over the blocks.

        The sinks are left out: their states are unlike all others.
        """
        total, squares, count = torch.zeros_like(self.centre), torch.zeros_like(self.centre), 0
        for tokens in blocks:

            def take(layer: int, name: str, hidden: Tensor) -> None:
                states = gate.normalised(hidden[0, self.recipe.sinks :], self.epsilon).to(total.device)
                total[layer] += states.sum(0)
                squares[layer] += states.square().sum(0)

            with hooked(model, {"residual"}, take):
                last_hidden_state(model, tokens)
            count += tokens.shape[1] - self.recipe.sinks
        self.centre.copy_(total / count)
        spread = (squares / count - self.centre.square()).clamp(min=0).sqrt()
        self.scale.copy_(1 / spread.clamp(min=1e-3))

    def logits(self, layer: int, hidden: Tensor) -> Tensor:
        """z `[rows, kv_heads, tokens]` of the layer's input `[rows, tokens, hidden]`."""
        device = hidden.device
        states = gate.normalised(hidden, self.epsilon) - self.centre[layer].to(device)
        states = states * self.scale[layer].to(device)
        read = states @ self.weight[layer].to(device).mT + self.constant * self.bias[layer].to(device)
        return gate.logits(read).transpose(1, 2)

    def decisions(self, layer: int, hidden: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """The soft decision logits that govern each token, noise included, and the share closed among those counted.

        `[rows, kv_heads, tokens]`, and a scalar whose value is that of the hard decisions and whose gradient is that
        of the soft ones.
        """
        z = gate.governing(self.logits(layer, hidden))
        soft = (z + self.recipe.noise * noise(seed, layer, z)) / self.recipe.temperature
        share = soft.sigmoid()
        share = (soft > 0).to(share.dtype) + share - share.detach()
        return soft, share[..., self._counted(share.shape[-1])].mean()

    def loss(self, batch: Batch) -> Losses:
        """The divergence from the dense model, plus the shortfall of the closed share from its target.

        Parts: `kl` in nats a token, over the tokens that some decision can reach; `closed` and `target`, shares of the
        tokens that leave the window within the text; `compression`, the shortfall.
        """
        assert batch.model is not None
        model, tokens = batch.model, batch.tokens
        first = self._first_reached(tokens)
        seed = int(torch.randint(2**48, (1,), generator=batch.generator, device=batch.generator.device))
        with torch.no_grad():
            teacher = last_hidden_state(model, tokens)[:, first:]
        inputs: dict[int, Tensor] = {}
        closed: dict[int, Tensor] = {}

        def take(layer: int, name: str, hidden: Tensor) -> None:
            inputs[layer] = hidden

        def attend(layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            # Drawn from the seed, so that a layer computed again in the backward pass decides alike.
            soft, closed[layer] = self.decisions(layer, inputs[layer].to(query.device), seed)
            return attend_visible(query, key, value, self.soft_mask(F.logsigmoid(-soft)), scaling)

        with hooked(model, {"residual"}, take), recomputed(model, tokens.numel() > KEPT_TOKENS):
            student = last_hidden_state(model, tokens, dense_attention=attend)[:, first:]
        kl = divergence(model, teacher, student, self.recipe.divergence)
        share = torch.stack([closed[layer].to(kl.device) for layer in sorted(closed)]).mean()
        target = self.recipe.target(batch.step, batch.steps)
        compression = (target - share).clamp(min=0)
        parts = {"kl": kl.item(), "closed": share.item(), "target": target, "compression": compression.item()}
        return Losses(kl + compression, parts)

    def soft_mask(self, penalty: Tensor) -> Visible:
        """All keys visible, with a penalty `[rows, kv_heads, tokens]` beyond the window that the sinks are spared."""
        length = penalty.shape[-1]
        sink = torch.arange(length, device=penalty.device) < self.recipe.sinks
        forever = torch.full((1, 1, length), length + 1, device=penalty.device)
        return Visible(forever, penalty=penalty.masked_fill(sink, 0.0), window=self.window)

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, blocks: Sequence[Tensor]) -> Mapping[str, Any]:
        """The table of `calibration.calibration_table`, for this gate."""
        return calibration_table(model, self.folded(), blocks, sinks=self.recipe.sinks, window=self.window)

    @torch.no_grad()
    def folded(self) -> gate.SeparateGate:
        """The gate for normalised inputs, with the standardisation folded into weight and bias."""
        weight = self.weight * self.scale[:, None]
        bias = self.constant * self.bias - (weight * self.centre[:, None]).sum(-1)
        return gate.SeparateGate(weight, bias, self.epsilon)

    def export(self) -> dict[str, Tensor]:
        """The folded `weight` `[layers, kv_heads, hidden]` and `bias` `[layers, kv_heads]`."""
        folded = self.folded()
        return {"weight": folded.weight, "bias": folded.bias}

    def card(self) -> Mapping[str, Any]:
        """The gate's constants and limits."""
        notes = [
            f"One gate, trained up to a compression ratio of {self.recipe.ratio:g}, serves all shares: a budget moves "
            "its threshold by the calibration, in a straight line between what was measured.",
            f"Tokens are in a trained order near the threshold 0 alone, within a few times {self.recipe.noise:g} (the "
            "scale of the training's noise): far from it, train for the ratio that is wanted.",
            "Texts unlike those of the calibration keep other shares than asked for; results state what was measured.",
            f"Trained with {self.recipe.sinks} sinks and a window of {self.window}; no others were tried with it.",
        ]
        return {
            "gate": "separate",
            "epsilon": self.epsilon,
            "sinks": self.recipe.sinks,
            "window": self.window,
            "notes": notes,
        }

    def _first_reached(self, tokens: Tensor) -> int:
        """The first position that some decision can reach; raises UserError where there is none."""
        first = self.recipe.sinks + self.window + 1
        if tokens.shape[1] <= first:
            raise UserError(f"DMS trains on texts of more than {first} tokens: sinks, window and one more.")
        return first

    def _counted(self, length: int) -> slice:
        """The tokens that leave the window within a text, over which the closed share is counted."""
        return slice(self.recipe.sinks, length - 1 - self.window)


def noise(seed: int, layer: int, like: Tensor) -> Tensor:
    """Logistic noise (the difference of two Gumbels) in the shape, dtype and device of `like`; equal seeds and layers
    give equal noise on any device."""
    generator = torch.Generator().manual_seed(seed * 1_009 + layer)
    uniform = torch.rand(like.shape, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    return uniform.logit().to(device=like.device, dtype=like.dtype)
