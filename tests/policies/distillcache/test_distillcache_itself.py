"""The twin itself: its bookkeeping against one dense forward, its features against closed forms, and models in half
precision against it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_distillcache_weights import SHAPE, weights
from twin_comparison import examples

from evictbench.cache.new_cache import new_cache
from evictbench.policies.distillcache import DistillCache
from evictbench.policy import Step
from twin import distillcache as twin
from twin.cases import Case, cases
from twin.distillcache import distillcache_cases, random_ranker
from twin.model import dense_forward
from twin.simulate import simulate
from twin.tiny import random_tokens, tiny_model

ALL = st.one_of(
    distillcache_cases(),
    distillcache_cases(hybrid=True),
    cases("h2o", shares=("layer", "model")),
    cases("snapkv", shares=("layer", "model")),
)


@examples(15)
@given(case=ALL)
def test_a_masked_dense_forward_says_the_same(case: Case) -> None:
    """The cut after the last layer, chunk by chunk, against one pass under the recorded visibility."""
    trace = case.trace()
    once = dense_forward(case.model(), trace.tokens, lambda layer, kv_head, query: trace.seen[query][layer, kv_head])
    torch.testing.assert_close(once.logits, trace.logits, rtol=0, atol=1e-9)
    for query, heads in enumerate(trace.seen):
        for head, positions in heads.items():
            assert positions[-1] == query
            before = trace.seen[query - 1][head] if query else []
            assert set(positions[:-1]) <= set(before), "what was dropped came back"


def test_features_where_all_look_equally() -> None:
    """A model without queries: each looks at the n that it sees with 1/n, whatever the head."""
    model, length = tiny_model(flat=True, layers=3, kv_heads=2, groups=2), 9
    trace = simulate(model, twin.DistillCache(), random_tokens(length), 0, 100)
    assert trace.record is not None
    found = twin.features(trace.record, list(range(length)), range(length))
    for token, (alpha, norm, sigma, entropy, place) in found.items():
        looks = [1 / (query + 1) for query in range(token, length)]
        assert alpha == pytest.approx(sum(looks) / length)
        assert sigma == pytest.approx(0, abs=1e-30)
        spreads = [math.log(query + 1) for query in range(token, length)]
        weighted = sum(look * spread for look, spread in zip(looks, spreads, strict=True))
        assert entropy == pytest.approx(weighted / sum(looks))
        assert place == token / (length - 1)
        values = torch.stack([layer[token] for layer in trace.record.values])
        assert norm == pytest.approx(values.pow(2).sum(-1).sqrt().mean().item())
    assert sum(five[0] for five in found.values()) == pytest.approx(1)


class Showing(DistillCache):
    """Keeps the last features and their positions."""

    shown: Any = None

    def features(self, step: Step) -> Any:
        found = super().features(step)
        self.shown = (step.positions[0, 0].tolist(), found[0].clone())
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_of_a_model_in_less_precision(dtype: torch.dtype) -> None:
    """They are float32, finite, and as near as the model itself is."""
    exact, prompt = tiny_model(layers=3, kv_heads=2, groups=2), random_tokens(90, 3)
    model: Any = copy.deepcopy(exact).to(dtype)
    policy = Showing()
    policy.use(weights(random_ranker(0)), SHAPE)
    cache = new_cache(model, policy, 40)
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt]), past_key_values=cache)
    positions, found = policy.shown
    assert found.dtype == torch.float32
    assert bool(found.isfinite().all())
    assert all(tensor.dtype == torch.float32 for tensor in cache.placements[0].state.values())
    trace = simulate(exact, twin.DistillCache(), prompt, 0, 1000)
    assert trace.record is not None
    wanted = twin.features(trace.record, list(range(90)), range(90))
    near = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}[dtype]
    for position, five in zip(positions, found.tolist(), strict=True):
        assert five == pytest.approx(wanted[position], rel=near, abs=1e-6)
