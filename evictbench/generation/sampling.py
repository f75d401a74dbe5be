"""Drawing the next token: one uniform number per (seed, sample, repeat, step), the same under every policy.

Two policies that give a step the same distribution draw the same token from it, so that a comparison of sampled
answers is paired down to the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evictbench.suite.spec import Sampling

_MASK = 2**64 - 1

NO_TOKEN = -1
"""In the place of a token that cannot be chosen."""


def uniform(seed: int, sample: int, repeat: int, step: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: four rounds of the splitmix64 finaliser."""
    state = 0x9E3779B97F4A7C15
    for part in (seed, sample, repeat, step):
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state = (state ^ (state >> 31)) + 0x9E3779B97F4A7C15 & _MASK
    return (state >> 11) / 2**53


def choose(logits: Tensor, samplings: Sequence[Sampling], numbers: Sequence[float]) -> list[int]:
    """The next token of every row; NO_TOKEN where its logits are not finite, some of minus infinity apart.

    logits `[rows, vocabulary]`; numbers: one uniform a row, unused where greedy.
    """
    tokens = logits.argmax(-1)
    # The largest is NaN where any is. What is found stays on the device until the tokens themselves are read.
    finite = logits.gather(-1, tokens[:, None])[:, 0].isfinite()
    for sampling in {sampling for sampling in samplings if sampling.temperature > 0}:
        rows = [row for row, other in enumerate(samplings) if other == sampling]
        drawn = torch.tensor([numbers[row] for row in rows], dtype=torch.float64, device=logits.device)
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = _draw(logits[index], sampling, drawn)
    return [int(token) for token in tokens.masked_fill(~finite, NO_TOKEN).tolist()]


def _draw(logits: Tensor, sampling: Sampling, numbers: Tensor) -> Tensor:
    """Temperature, then top_k, top_p and min_p, each over what the one before left; then the inverse of the
    cumulative distribution, most likely token first."""
    vocabulary = logits.shape[-1]
    count = min(sampling.top_k or vocabulary, vocabulary)
    ordered, candidates = (logits.float() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    probs = ordered[:, :count].double().softmax(-1)
    if sampling.top_p < 1:
        # The smallest set that reaches top_p: a token stays while those before it fall short.
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= sampling.top_p, 0)
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs[:, :1], 0)
    reached = probs.cumsum(-1)
    place = torch.searchsorted(reached, (numbers * reached[:, -1])[:, None], right=True)
    # Rounding may put a number at the very end of the distribution past it: the last token with any weight.
    last = ((probs > 0).sum(-1, keepdim=True) - 1).clamp(min=0)  # logits of NaN leave no token with any
    return candidates.gather(-1, torch.minimum(place, last))[:, 0]
