"""DMS decides for all layers at the end of a pass: what it keeps and answers is what it does layer by layer."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_dms_twin import feed, gate_weights

from evictbench.cache.paged import stack
from evictbench.cache.paged.cache import PagedCache
from evictbench.generation.batching import admit, release
from evictbench.policies.dms import DMS, Settings
from evictbench.policies.dms.gate import SeparateGate
from evictbench.policy import Arriving, ModelShape
from twin.tiny import random_tokens, tiny_model


class AtZero(DMS):
    """DMS with a threshold of 0 whatever the budget."""

    def allot(self, share: float, length: int) -> float:
        return 0.0


class LayerByLayer(AtZero):
    """The same, decided as each layer attends."""

    decides_late = False


def build(cls: type[DMS], model: Any, gate: str, window: int, sinks: int, seed: int) -> DMS:
    if gate == "borrowed":
        return cls(Settings(window=window, sinks=sinks, gate="borrowed"))
    policy = cls(Settings(window=window, sinks=sinks, alpha_per="layer" if gate == "layer" else "head"))
    policy.use(gate_weights(model.config.hidden_size, seed), ModelShape.of(model.config))
    found = policy._gate
    assert isinstance(found, SeparateGate)
    policy._gate = SeparateGate(found.weight.double(), found.bias.double(), found.epsilon)
    return policy


def held(cache: PagedCache) -> tuple[Any, ...]:
    """Everything that can be told of a cache from outside."""
    assert cache.nbytes() == cache.bytes_held
    kept = [[cache.kept(layer, row).tolist() for layer in range(2)] for row in range(len(cache.seen))]
    seen = [(one.steps, one.largest, one.total) for one in cache.occupancy]
    pools = [layer.pool for layer in cache.layers]
    slots = [
        (pool.tables, [pool.entries(owner, name).tolist() for owner in range(len(pool.tables)) if pool.tables[owner]])
        for pool in pools
        if pool is not None
        for name in ("positions", "deadlines")
    ]
    return kept, seen, slots, cache.nbytes(), cache.bytes_peak


def sequences(model: Any, policy: DMS, seed: int, rows: int, steps: int) -> list[tuple[torch.Tensor, tuple[Any, ...]]]:
    """Rows that come, decode, sometimes read a few tokens at once, and go: logits and what is held, after each pass."""
    draw, found = random.Random(seed), []
    cache = PagedCache(model, policy, "50%", rows=rows)
    for _ in range(steps):
        while len(cache.seen) < rows and (not cache.seen or draw.random() < 0.5):
            length = draw.randint(1, 50)
            prompt = PagedCache(model, policy, "50%", prompt_length=length)
            feed(model, prompt, random_tokens(length, draw.randint(0, 99)))
            for _ in range(draw.choice((0, 0, 3))):
                feed(model, prompt, random_tokens(1, draw.randint(0, 99)))
            admit(cache, prompt)
        new = draw.choice((1, 1, 1, 1, 1, 1, 1, 4))
        positions = torch.tensor(cache.seen)[:, None] + torch.arange(new)
        tokens = torch.tensor([random_tokens(new, draw.randint(0, 99)) for _ in cache.seen])
        with torch.no_grad(), cache.listening():
            logits = model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True).logits
        found.append((logits, held(cache)))
        if draw.random() < 0.1:
            release(cache, draw.randrange(len(cache.seen)))
    return found


@pytest.mark.engine
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 4),
    steps=st.integers(1, 60),
    window=st.integers(1, 20),
    sinks=st.integers(0, 4),
    gate=st.sampled_from(["head", "layer", "borrowed"]),
    few=st.sampled_from([0, stack.FEW]),
    kind=st.sampled_from(["llama", "qwen3"]),
    seed=st.integers(0, 1000),
)
def test_all_layers_at_once_are_as_one_by_one(
    rows: int, steps: int, window: int, sinks: int, gate: str, few: int, kind: Any, seed: int
) -> None:
    model = tiny_model(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "FEW", few)
        together, apart = (
            sequences(model, build(cls, model, gate, window, sinks, seed), seed, rows, steps)
            for cls in (AtZero, LayerByLayer)
        )
    for (ours, has), (expected, had) in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)
        assert has == had


@pytest.mark.engine
@pytest.mark.parametrize(("first", "seed"), [(5, 0), *((0, seed) for seed in range(8))])
def test_a_row_may_have_had_nothing(first: int, seed: int) -> None:
    """A batch whose second row is all padding until the prompt has ended."""
    model = tiny_model("llama")
    found = []
    for cls in (AtZero, LayerByLayer):
        cache = PagedCache(model, build(cls, model, "head", 9, 0, seed), "50%", prompt_length=12)
        mask = torch.ones((2, 12), dtype=torch.long)
        mask[1, : 12 - first] = 0
        ids = torch.tensor([random_tokens(12, seed), random_tokens(12, seed + 9)])
        with torch.no_grad(), cache.listening():
            model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            for step in range(15):
                logits = model(
                    input_ids=torch.tensor([random_tokens(1, step), random_tokens(1, step + 50)]),
                    position_ids=torch.tensor(cache.seen)[:, None],
                    past_key_values=cache,
                    use_cache=True,
                ).logits
                found.append((cls, logits, held(cache)))
    half = len(found) // 2
    for (_, ours, has), (_, expected, had) in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)
        assert has == had


def test_the_gate_of_several_layers_is_that_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn((5, 3, 32), generator=generator), torch.randn((5, 3), generator=generator)
    gate, hidden = SeparateGate(weight, bias), torch.randn((5, 2, 1, 32), generator=generator)
    for layers in ([0, 1, 2, 3, 4], [1, 4]):
        expected = torch.stack([gate.logits(layer, hidden[layer]) for layer in layers])
        torch.testing.assert_close(gate.logits_of_layers(layers, hidden[layers]), expected, atol=2e-3, rtol=1e-5)


def test_what_a_subclass_says_of_one_layer_holds_for_all() -> None:
    class Overruled(DMS):
        def expiry(self, arriving: Arriving) -> torch.Tensor:
            return super().expiry(arriving) + arriving.layer

    read, positions = torch.ones((1, 2, 1)), torch.full((1, 1), 7, dtype=torch.int32)
    shape = ModelShape(layers=2, heads=2, kv_heads=2, head_dim=8)
    arriving = [Arriving(layer, shape, positions, torch.zeros(1), read) for layer in range(2)]
    overruled, plain = Overruled(Settings(window=3)), DMS(Settings(window=3))
    for policy in (overruled, plain):
        expected = torch.stack([policy.expiry(one) for one in arriving])
        assert torch.equal(policy.expiry_together(arriving), expected)
    assert not torch.equal(overruled.expiry_together(arriving), plain.expiry_together(arriving))
