"""Every policy on a small model in float32, on a device and on the CPU: kept sets and logits.

The same weights and tokens on both. Two prompts of different lengths are read in chunks, then decode together, so that
chunked reading, the cut at a prompt's end, rows that differ and slots that are overwritten all take part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.random_policies import policy_for
from evictbench.generation.runner import ModelRunner
from evictbench.policy import ModelShape
from evictbench.policy.budget import Budget

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.base import KVCache

ALLOWED = 1e-3
"""The difference of logits that is allowed, as a share of the largest: kernels sum in another order. A kept set that
differs moves logits by far more."""

VOCABULARY = 97
BUDGET = 128
WINDOW = 16


@dataclass(frozen=True)
class Equality:
    """The comparison of one policy.

    compared: number of kept sets, by layer, row and moment. differing: how many of those differ. logits: the largest
    difference, as a share of the largest logit. error: what went wrong instead.
    """

    policy: str
    compared: int = 0
    differing: int = 0
    logits: float = 0.0
    error: str | None = None

    @property
    def equal(self) -> bool:
        """Whether kept sets are equal, and logits differ by no more than kernels may."""
        return self.error is None and self.compared > 0 and not self.differing and self.logits <= ALLOWED

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.error is not None:
            return f"failed: {self.error}"
        return f"{self.differing} of {self.compared} kept sets differ, logits by {self.logits:.1e}"


def small_model(seed: int = 0) -> PreTrainedModel:
    """A random Qwen3 of two layers on the CPU, in float32; weights wide enough for attention to have favourites."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    return model


def compare(policy: str, model: PreTrainedModel, device: str, lengths: tuple[int, ...], steps: int) -> Equality:
    """Run a policy on the CPU and on the device, moment by moment, with the same tokens. model: on the CPU."""
    try:
        other: Any = copy.deepcopy(model)
        other = other.to(device)
        pairs = zip(moments(policy, model, lengths, steps), moments(policy, other, lengths, steps), strict=True)
        compared = differing = 0
        worst = 0.0
        for (kept, logits), (other_kept, other_logits) in pairs:
            compared += len(kept)
            differing += sum(not same(*sets) for sets in zip(kept, other_kept, strict=True))
            expected = logits.double()
            worst = max(worst, float((other_logits.cpu().double() - expected).abs().max() / expected.abs().max()))
        return Equality(policy, compared, differing, worst)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # one policy's failure is a line of the table
        return Equality(policy, error=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")


def same(kept: Tensor, other: Tensor) -> bool:
    """Whether two kept sets hold equal positions, on whatever device."""
    return kept.shape == other.shape and bool((kept.cpu() == other.cpu()).all())


def moments(
    policy: str, model: PreTrainedModel, lengths: tuple[int, ...], steps: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """After each prompt and each decode step: the positions kept by every layer and row, and the last logits.

    Tokens are drawn from a seed and not chosen by the model.
    """
    chosen = policy_for(policy, model.config, WINDOW)
    minimum = chosen.minimum_budget(ModelShape.of(model.config))
    budget = Budget(tokens=max(BUDGET, minimum + 8)) if chosen.needs_budget else None
    runner = ModelRunner(model, chosen, budget, chunk=48)
    generator = torch.Generator().manual_seed(1)
    decoding = runner.new_cache(rows=len(lengths))
    for length in lengths:
        cache, logits = runner.prefill(torch.randint(VOCABULARY, (length,), generator=generator).tolist())
        yield _kept(cache), logits
        decoding.admit(cache)
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (len(lengths), 1), generator=generator).tolist()
        logits = runner.forward(decoding, tokens, list(decoding.seen))
        yield _kept(decoding), logits


def _kept(cache: KVCache) -> list[Tensor]:
    return [cache.kept(layer, row).cpu() for layer in range(cache.shape.layers) for row in range(len(cache.seen))]
