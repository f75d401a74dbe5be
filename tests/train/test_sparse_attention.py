"""The sparse student's attention: against an explicit mask, on both paths, and against the policy's own prefill."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evictbench.cache import attention
from evictbench.cache.new_cache import new_cache
from evictbench.policy import NEVER, ModelShape, NoSettings
from evictbench.policy.learner import Batch, Training, Visible
from evictbench.registry import parse_policy
from evictbench.train import sparse_attention
from evictbench.train.sparse_attention import StudentAttention, attend_visible
from twin.tiny import random_tokens, tiny_model

SCALING = 0.3


def random_inputs(seed, rows=2, kv_heads=2, group=2, length=21, width=8):
    generator = torch.Generator().manual_seed(seed)

    def normal(heads):
        return torch.randn(rows, heads, length, width, generator=generator, dtype=torch.float64)

    expiry = torch.arange(length) + torch.randint(0, length, (rows, kv_heads, length), generator=generator)
    penalty = -torch.rand(rows, kv_heads, length, generator=generator, dtype=torch.float64) * 3
    return normal(kv_heads * group), normal(kv_heads), normal(kv_heads), expiry, penalty


def reference_attention(query, key, value, expiry, penalty=None, window=0):
    """Row by row, head by head, query by query."""
    output = torch.zeros_like(query)
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            kept = head // (query.shape[1] // key.shape[1])
            own = min(kept, expiry.shape[1] - 1)
            for q in range(query.shape[2]):
                seen = [t for t in range(q + 1) if t == q or q < expiry[row, own, t]]
                logits = torch.stack([query[row, head, q] @ key[row, kept, t] for t in seen]) * SCALING
                if penalty is not None:
                    late = [float(q - t > window) * penalty[row, own, t] for t in seen]
                    logits = logits + torch.stack(late)
                output[row, head, q] = logits.softmax(0) @ value[row, kept, seen]
    return output


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), tile=st.sampled_from([1, 5, 256]), soft=st.booleans(), shared=st.booleans())
def test_tiles_equal_the_definition(seed, tile, soft, shared):
    query, key, value, expiry, penalty = random_inputs(seed)
    if shared:
        expiry, penalty = expiry[:, :1], penalty[:, :1]
    penalty = penalty if soft else None
    before, sparse_attention.TILE = sparse_attention.TILE, tile
    try:
        output = attend_visible(query, key, value, Visible(expiry, penalty, window=3), SCALING)
    finally:
        sparse_attention.TILE = before
    assert torch.allclose(output, reference_attention(query, key, value, expiry, penalty, window=3), atol=1e-12)


@pytest.mark.parametrize("soft", [False, True])
def test_the_one_kernel_equals_the_tiles(soft):
    """FlexAttention unfused, as the CPU runs it; the kernel itself needs a GPU."""
    query, key, value, expiry, penalty = (tensor[:1] for tensor in random_inputs(3, length=128, width=16))
    visible = Visible(expiry, penalty if soft else None, window=3)
    tiles = sparse_attention._tiled(query, key, value, visible, SCALING)
    assert torch.allclose(sparse_attention._flex(query, key, value, visible, SCALING), tiles, atol=1e-6)


def test_gradients_reach_queries_keys_values_and_penalties():
    query, key, value, expiry, penalty = random_inputs(5, length=9)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, penalty)]
    assert torch.autograd.gradcheck(
        lambda q, k, v, p: attend_visible(q, k, v, Visible(expiry, p, window=2), SCALING), leaves
    )


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("policy", ["streaming_llm", "streaming_llm:positions=original"])
def test_the_streaming_student_sees_what_the_policy_sees(kind, policy):
    """One sparse pass over a text equals the policy's own prefill of it, token by token."""
    model = tiny_model(kind)
    attention.use(model)
    chosen = parse_policy(policy)
    tokens = torch.tensor([random_tokens(40)])
    budget = 12
    training = Training(
        window=4, budgets=(budget,), length=40, steps=1, seed=0, recipe=NoSettings(), model=model.config
    )
    learner = chosen.policy(chosen.config).learner(ModelShape.of(model.config), training)
    learner.begin(model, [])
    batch = Batch(tokens, step=0, steps=1, budget=budget, window=4, generator=torch.Generator())
    with torch.no_grad():
        sparse = model(
            input_ids=tokens, use_cache=False, dense_attention=StudentAttention(learner.attention(batch))
        ).logits
        cache = new_cache(model, chosen.policy(chosen.config), budget, prefill="bounded", prompt_length=40)
        evicted = [
            model(input_ids=tokens[:, at : at + 1], position_ids=torch.tensor([[at]]), past_key_values=cache).logits
            for at in range(40)
        ]
        dense = model(input_ids=tokens, use_cache=False).logits
    assert torch.allclose(sparse, torch.cat(evicted, dim=1), atol=1e-8)
    assert not torch.allclose(sparse, dense, atol=1e-3)


def test_nothing_hidden_is_the_dense_model():
    model = tiny_model("llama")
    attention.use(model)
    tokens = torch.tensor([random_tokens(30)])

    class Everything:
        def visible(self, layer, module, query, key, value):
            return Visible(torch.full((1, 1, key.shape[2]), NEVER))

        def features(self):
            return None

    with torch.no_grad():
        seen = model(input_ids=tokens, use_cache=False, dense_attention=StudentAttention(Everything())).logits
        assert torch.allclose(seen, model(input_ids=tokens, use_cache=False).logits, atol=1e-12)
