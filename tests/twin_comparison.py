"""The engine against a brute-force twin: how to run it, what has to be equal, and how a test shows that it can fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, seed, settings
from torch import Tensor

from evictbench.cache.base import KVCache
from evictbench.cache.new_cache import new_cache
from evictbench.cache.probe import cache_argument
from evictbench.generation.dense_run import watch_dense_run
from evictbench.policy import BasePolicy, ModelShape, Policy
from twin.cases import Case

EXACT = 1e-9
"""Scores closer than this may be ordered either way."""

NewCache = Callable[[int], KVCache]
"""A new cache for a prompt of this many tokens."""


def examples(count: int) -> settings:
    """Hypothesis's settings for a comparison of this many cases (`make test-thorough`), however slow each is.

    Without ALL_CASES in the environment half of them are drawn, at least 20, anew in every run.
    """
    return _cases(count if os.environ.get("ALL_CASES") else min(count, max(20, count // 2)))


def _cases(count: int, **more: Any) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), **more)


def assert_found(compare: Callable[..., Any], drawn: Callable[..., Any], count: int = 60) -> None:
    """The comparison fails on one of the first cases. drawn: `given(...)` of its arguments; the cases never change."""
    same_cases = _cases(count, database=None, report_multiple_bugs=False, phases=[Phase.generate])

    def run(**case: Any) -> None:  # what Hypothesis runs must return None
        compare(**case)

    with pytest.raises(AssertionError):
        same_cases(seed(0)(drawn(run)))()


@dataclass
class EngineTrace:
    """logits[n]: the prediction after token n; kept[n][layer, kv_head]: positions held when n tokens were seen."""

    tokens: list[int]
    logits: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[int, dict[tuple[int, int], list[int]]] = field(default_factory=dict)


def forward(model: Any, cache: KVCache, tokens: list[int]) -> Tensor:
    """Logits of one sequence's next tokens, `[tokens, vocabulary]`."""
    return forward_rows(model, cache, [tokens])[0]


def forward_rows(model: Any, cache: KVCache, tokens: list[list[int]]) -> Tensor:
    """Logits of the next tokens of every row, equally many each: `[rows, tokens, vocabulary]`."""
    seen = torch.tensor(cache.seen if cache.seen else [0] * len(tokens))
    positions = seen[:, None] + torch.arange(len(tokens[0]))
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(tokens), position_ids=positions, use_cache=True, **{cache_argument(model): cache}
        )
    assert cache.nbytes() == cache.bytes_held
    logits: Tensor = output.logits
    return logits


def forward_in_parts(model: Any, cache: KVCache, tokens: list[int], sizes: list[int]) -> Tensor:
    """Logits of every token, given to the model in parts of these sizes and the rest one by one."""
    logits, start = [], 0
    for size in [*sizes, *[1] * len(tokens)]:
        if start < len(tokens):
            logits.append(forward(model, cache, tokens[start : start + size]))
            start += size
    return torch.cat(logits)


def kept(cache: KVCache, layer: int, head: int, row: int = 0) -> list[int]:
    """Positions that a KV head holds, ascending, without centroids."""
    return [position for position in cache.kept(layer, row)[head].tolist() if position >= 0]


def run_case(case: Case, policy: BasePolicy) -> EngineTrace:
    """Prefill in chunks to the border or the prompt's end, the question as one chunk, then token by token."""
    model = case.model()
    charge = policy.charge(ModelShape.of(model.config))
    policy.minimum_budget = lambda shape: charge.cost(1)  # type: ignore[method-assign]
    budget = case.budget
    if isinstance(budget, int):
        budget = charge.cost(budget)
    elif budget is not None:
        budget = f"{budget * 100:g}%"
    end = len(case.prompt) if case.border is None else case.border
    cache = new_cache(model, policy, budget, prefill=case.prefill, prompt_length=end)
    if isinstance(policy, Policy) and policy.needs_labels:
        forced = () if isinstance(case.new_tokens, int) else case.new_tokens
        cache.set_labels(policy.labels(partial(watch_dense_run, model, [*case.prompt, *forced])))
    trace = EngineTrace(list(case.prompt))

    def feed(tokens: list[int]) -> int:
        logits = forward(model, cache, tokens)
        seen = cache.seen[0]
        for offset, row in enumerate(logits):
            trace.logits[seen - len(tokens) + offset] = row
        trace.kept[seen] = {}
        for layer in range(cache.shape.layers):
            held = cache.kept(layer).expand(cache.shape.kv_heads, -1)
            trace.kept[seen].update({(layer, head): held[head].tolist() for head in range(cache.shape.kv_heads)})
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


def check(case: Case, policy: BasePolicy, exact: float = EXACT) -> None:
    """The policy keeps what its twin keeps in every head after every pass, and its logits are equal to 1e-9.

    A case in which two of the twin's scores are closer than `exact` is passed over.
    """
    if not isinstance(case.budget, int):
        charge = policy.charge(ModelShape.of(case.model().config))
        case = replace(case, charged=charge.fixed, beside=charge.per_entry)
        assume(case.budget is None or charge.slots(32) >= max(1, case.rule.least_budget))
    twin = case.trace()
    assume(twin.closest >= exact)
    ours = run_case(case, policy)
    assert ours.tokens[: len(twin.tokens)] == list(twin.tokens)
    compared = 0
    for seen, sets in ours.kept.items():
        if seen in twin.kept:
            compared += 1
            for head, positions in sets.items():
                assert positions == sorted(twin.kept[seen][head]), (seen, head)
    assert compared
    assert_logits(ours, twin)


def assert_logits(ours: EngineTrace, twin: Any) -> None:
    for position, logits in ours.logits.items():
        torch.testing.assert_close(logits, twin.logits[position], atol=1e-9, rtol=0)


def check_rows_that_come_and_go(
    model: Any, cache_for: NewCache, batch: KVCache, texts: list[list[int]], prompts: list[int]
) -> None:
    """Texts decode as rows of a batch of two, each as soon as there is room: the logits of each are those it has alone.

    prompts: how many tokens of each text are its prompt.
    """
    expected = [
        forward_in_parts(model, cache_for(length), text, [length]) for text, length in zip(texts, prompts, strict=True)
    ]
    waiting, active = list(range(len(texts))), list[int]()
    while waiting or active:
        while waiting and len(active) < 2:
            index = waiting.pop(0)
            prompt = cache_for(prompts[index])
            forward(model, prompt, texts[index][: prompts[index]])
            assert batch.admit(prompt) == len(active)
            active.append(index)
        logits = forward_rows(model, batch, [[texts[index][batch.seen[row]]] for row, index in enumerate(active)])
        for row, index in enumerate(active):
            torch.testing.assert_close(logits[row, 0], expected[index][batch.seen[row] - 1], atol=1e-9, rtol=0)
        for row in range(len(active) - 1, -1, -1):
            if batch.seen[row] == len(texts[active[row]]):
                batch.release(row)
                active[row] = active[-1]
                active.pop()


def generate_padded(model: Any, cache: KVCache, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Twenty greedy tokens after each prompt by transformers' generate, the shorter ones padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0} | options
    output = model.generate(ids, attention_mask=mask, **{cache_argument(model): cache}, **options)
    assert cache.nbytes() == cache.bytes_held
    return [row[longest:].tolist() for row in output]
