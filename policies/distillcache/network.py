"""The ranker: a small network that scores a cache entry by its five features."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from .recipe import NAMES

WIDTH = 128

_LEAST = (1e-8, 1e-6, 1e-14)
"""Added to alpha, norm and sigma before their logarithms are taken; far below the attention of a head."""


class Ranker(nn.Module):
    """Maps five standardised features to a score, 5 -> 128 -> 128 -> 1, with a LayerNorm and a ReLU after each of the
    two layers of `width` units.

    alpha, norm and sigma span orders of magnitude, so their logarithms are taken first. shift and scale `[5]` are set
    from the training's features (`measure`), which brings a model with longer values or texts to the same range.

    The paper (arXiv 2608.08878, appendix D) has "a two-layer MLP with 128 hidden units, ReLU activations, and
    LayerNorm", of about 200,000 parameters; these widths have 17,921. It does not say where the LayerNorm stands; over
    the five features themselves it would remove their common size.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(5))
        self.register_buffer("scale", torch.ones(5))
        self.layers = nn.Sequential(
            nn.Linear(5, width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def use_only(self, names: Collection[str]) -> None:
        """Make the first layer's weights of all other features 0, and keep them from being trained."""
        used = torch.tensor([name in names for name in NAMES])
        if used.all():
            return
        weight = self.layers[0].weight
        assert isinstance(weight, nn.Parameter)
        with torch.no_grad():
            weight.mul_(used.to(weight))
        weight.register_hook(lambda slope: slope * used.to(slope))

    @torch.no_grad()
    def measure(self, features: Tensor) -> None:
        """Set shift and scale to the mean and deviation of the features `[.., 5]` of some texts."""
        prepared = prepare(features.to(self.shift)).reshape(-1, 5)
        self.shift.copy_(prepared.mean(0))
        self.scale.copy_(prepared.std(0, correction=0).clamp(min=1e-3))

    def forward(self, features: Tensor) -> Tensor:
        """The scores `[..]` of features `[.., 5]`; the entries with the highest are kept."""
        prepared = (prepare(features) - self.shift) / self.scale
        scores: Tensor = self.layers(prepared.to(self.shift.dtype))
        return scores[..., 0]


def prepare(features: Tensor) -> Tensor:
    """The features `[.., 5]` with the logarithms of alpha, norm and sigma; entropy and place are unchanged."""
    # Feature by feature: a tensor of constants would be a copy to the device at every step.
    logs = [(features[..., index] + least).log() for index, least in enumerate(_LEAST)]
    return torch.cat((torch.stack(logs, dim=-1), features[..., 3:]), dim=-1)
