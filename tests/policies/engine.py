"""Run the engine the way a twin's case says, forward pass by forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evictbench.cache.slots.cache import EvictionCache
from evictbench.generation.dense_run import watch_dense_run
from evictbench.policy import ModelShape, Policy
from twin.cases import Case


@dataclass
class EngineTrace:
    """logits[n]: the prediction after token n; kept[n][layer, kv_head]: positions held when n tokens were seen."""

    tokens: list[int]
    logits: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[int, dict[tuple[int, int], list[int]]] = field(default_factory=dict)


def forward(model: Any, cache: EvictionCache, tokens: list[int]) -> Tensor:
    start = cache.seen[0] if cache.seen else 0
    positions = torch.arange(start, start + len(tokens))[None]
    with torch.no_grad():
        output = model(input_ids=torch.tensor([tokens]), position_ids=positions, past_key_values=cache, use_cache=True)
    return output.logits[0]


def run_case(case: Case, policy: Policy) -> EngineTrace:
    """Prefill in chunks to the border or the prompt's end, the question as one chunk, then token by token."""
    model = case.model()
    charged = policy.charged_state(ModelShape.of(model.config))
    policy.minimum_budget = lambda shape: 1 + charged  # type: ignore[method-assign]
    budget = case.budget
    if isinstance(budget, int):
        budget += charged
    elif budget is not None:
        budget = f"{budget * 100:g}%"
    end = len(case.prompt) if case.border is None else case.border
    cache = EvictionCache(model, policy, budget, prefill=case.prefill, prompt_length=end)
    if policy.foresees:
        forced = () if isinstance(case.new_tokens, int) else case.new_tokens
        cache.foretell(policy.foresee(partial(watch_dense_run, model, [*case.prompt, *forced])))
    trace = EngineTrace(list(case.prompt))

    def feed(tokens: list[int]) -> int:
        logits = forward(model, cache, tokens)
        seen = cache.seen[0]
        for offset, row in enumerate(logits):
            trace.logits[seen - len(tokens) + offset] = row
        trace.kept[seen] = {}
        for layer in range(cache.shape.layers):
            kept = cache.kept(layer).expand(cache.shape.kv_heads, -1)
            trace.kept[seen].update({(layer, head): kept[head].tolist() for head in range(cache.shape.kv_heads)})
        assert cache.nbytes() == cache.bytes_held
        return int(logits[-1].argmax())

    chosen = 0
    for start in range(0, end, case.chunk):
        chosen = feed(list(case.prompt[start : min(end, start + case.chunk)]))
    if end < len(case.prompt):
        chosen = feed(list(case.prompt[end:]))
    steps = case.new_tokens if isinstance(case.new_tokens, int) else len(case.new_tokens)
    for step in range(steps):
        token = chosen if isinstance(case.new_tokens, int) else case.new_tokens[step]
        trace.tokens.append(token)
        chosen = feed([token])
    return trace
