"""IndexMem++'s training: a scorer per layer learns which entries a frozen model needs to predict as the dense one does.

The student is the model itself under the training gate (`gate`); each layer's scorer reads the student's own hidden
states. The loss is its divergence from the dense model, over the whole vocabulary. After the authors' recipe
(Chooovy/kvpress, configs/train.json). Deviations: the mean is over the positions that the gate reaches, since all
before them are predicted as by the dense model; the optimiser is that of all trainings here (betas as theirs, weight
decay 1e-4 for 0, a cosine for their warm-up, plateau and line); float32 scorers beside a model of any dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from evictbench.cache.hooks import hooked
from evictbench.errors import UserError
from evictbench.policy.learner import Batch, Learner, Losses, Training
from evictbench.train.distillation import KEPT_TOKENS, check_head, divergence, last_hidden_state, recomputed

from .gate import Gate, attend_gated
from .recipe import Recipe
from .scorer import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.policy import ModelShape


class IndexMemLearner(Learner):
    """The scorers of all layers, in training beside a frozen model."""

    held_out: ClassVar[int] = 8

    def __init__(self, shape: ModelShape, training: Training) -> None:
        super().__init__()
        self.recipe: Recipe = training.recipe
        self.length = training.length
        beta = None if self.recipe.gate == "plain" else self.recipe.beta
        self.gate = Gate(self.recipe.sinks, training.window, beta)
        if training.length <= self.gate.first:
            raise UserError(
                f"indexmem_pp trains on texts of more than {self.gate.first} tokens ({self.recipe.sinks} sinks, a "
                f"window of {training.window}, and a beta of {self.recipe.beta:g}), and --length is {training.length}."
            )
        hidden = int(training.model.hidden_size)
        self.layers = nn.ModuleList(Scorer(hidden, self.recipe.width, shape.kv_heads) for _ in range(shape.layers))

    @property
    def scorers(self) -> list[Scorer]:
        """The scorers, one per layer."""
        return [layer for layer in self.layers if isinstance(layer, Scorer)]

    def begin(self, model: PreTrainedModel, blocks: Sequence[Tensor]) -> None:
        """Raise UserError for a model that does more to its logits than its output head does. No statistics are set."""
        check_head(model)

    def loss(self, batch: Batch) -> Losses:
        """The divergence from the dense model, in nats a token, over the positions that the gate reaches.

        Parts: `kl`, the loss; `gated`, the share of attention that falls on the entries that share the mass, a mean
        over layers. A text that the gate does not reach has a loss of 0 without a gradient.
        """
        assert batch.model is not None
        model, tokens = batch.model, batch.tokens
        first = self.gate.first
        if tokens.shape[1] <= first:
            return Losses(torch.zeros((), device=tokens.device), {"kl": torch.nan})
        with torch.no_grad():
            teacher = last_hidden_state(model, tokens)[:, first:]
        # A layer that is computed again in the backward pass reads its first inputs: the hooks are gone by then.
        scorers = self.scorers
        inputs: dict[int, Tensor] = {}
        gated: dict[int, Tensor] = {}

        def take(layer: int, name: str, hidden: Tensor) -> None:
            inputs[layer] = hidden

        def attend(layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            scorer = scorers[layer]
            device = scorer.gate_scale.device
            numbers = (*scorer(inputs[layer].to(device)), scorer.gate_scale)
            score, rate, scale = (number.to(query.device) for number in numbers)
            output, gated[layer] = attend_gated(query, key, value, score, rate, scale, self.gate, scaling)
            return output

        with hooked(model, {"normed_hidden"}, take), recomputed(model, tokens.numel() > KEPT_TOKENS):
            student = last_hidden_state(model, tokens, dense_attention=attend)[:, first:]
        kl = divergence(model, teacher, student, self.recipe.divergence)
        share = torch.stack([gated[layer].to(kl.device) for layer in sorted(gated)]).mean()
        return Losses(kl, {"kl": float(kl.detach()), "gated": float(share)})

    def export(self) -> dict[str, Tensor]:
        """The tensors of a `Scorer`, each with the layers in front: `[layers, ...]`."""
        states = [scorer.state_dict() for scorer in self.scorers]
        return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}

    @torch.no_grad()
    def card(self) -> Mapping[str, Any]:
        """The scorers' settings and limits."""
        recipe, window = self.recipe, self.gate.window
        scales = torch.cat([scorer.gate_scale for scorer in self.scorers])
        return {
            "settings": {
                "sinks": recipe.sinks,
                "window": window,
                "centroids": recipe.centroids,
                "beta": recipe.beta,
                "width": recipe.width,
                "gate": recipe.gate,
                "divergence": recipe.divergence,
            },
            "gate_scale": {"least": float(scales.min()), "largest": float(scales.max())},
            "notes": [
                f"Trained with {recipe.sinks} sinks and a window of {window}; no others were tried with it.",
                f"The texts had up to {self.length} tokens: what is needed later than that was not to be learned, and "
                "how scores fade over longer distances was hardly seen.",
            ],
        }
