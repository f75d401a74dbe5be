"""Our policies on the tiny models that authors' code was run on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache as once
from typing import Any, Literal

import torch
from torch import Tensor
from twin_comparison import forward

from evictbench.cache.new_cache import new_cache
from evictbench.policy import ModelShape, Policy
from studies.authors import tiny_llama

EQUAL = 1e-5
"""The authors' code takes some of its softmaxes and rotations in float32."""

Sets = list[list[list[int]]]
"""Positions by layer and head."""


@dataclass
class Run:
    """What a policy did with a text. logits: `[tokens, SHOWN]`. kept: what was held after so many tokens."""

    logits: Tensor
    kept: dict[int, Sets] = field(default_factory=dict)


@once
def model(kv_heads: int, seed: int) -> Any:
    """The tiny model; the same object for the same arguments."""
    return tiny_llama.build(kv_heads, seed)


def run(
    policy: Policy,
    case: dict[str, Any],
    entries: int,
    prompt: int,
    prefill: Literal["native", "dense", "bounded"] = "native",
    chunk: int | None = None,
) -> Run:
    """Read a case's prompt, in chunks if so, then the rest token by token. entries: the budget, without the charge."""
    llama = model(case["kv_heads"], case["seed"])
    tokens = tiny_llama.text(case["tokens"], case["seed"])
    charge = policy.charge(ModelShape.of(llama.config))
    policy.minimum_budget = lambda shape: charge.cost(1)  # type: ignore[method-assign]
    cache = new_cache(llama, policy, charge.cost(entries), prefill=prefill, prompt_length=prompt)
    chunk = chunk or prompt
    ends = [*range(chunk, prompt, chunk), *range(prompt, len(tokens) + 1)]
    logits, kept = [], {}
    for start, end in zip([0, *ends], ends, strict=False):
        logits.append(forward(llama, cache, tokens[start:end]))
        kept[end] = [cache.kept(layer).expand(cache.shape.kv_heads, -1).tolist() for layer in range(cache.shape.layers)]
    return Run(torch.cat(logits)[:, : tiny_llama.SHOWN], kept)


def largest_difference(ours: Tensor, theirs: Any) -> float:
    """The largest absolute difference of two tensors, the second one as nested lists."""
    return float((ours - torch.tensor(theirs, dtype=torch.float64)).abs().max())
