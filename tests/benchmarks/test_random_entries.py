"""A cache filled with random entries is one that has read: as large, as full, and good to go on with."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_equality import VOCABULARY, small_model
from benchmarks.random_entries import filled, positions, spread_lengths
from benchmarks.random_policies import gate, policy_for
from benchmarks.steps import Oldest
from evictbench.cache.paged.pool import PAGE
from evictbench.errors import UserError
from evictbench.generation.runner import ModelRunner
from evictbench.policy import ModelShape
from evictbench.policy.budget import Budget

SEEN = 300
SLOTS = ("full", "no policy", "streaming_llm", "tova", "h2o", "random", "kvpop", "kvpop_mlp", "distillcache")


@pytest.fixture(scope="module")
def model():
    return small_model()


def runner_for(model, name, budget=Budget(tokens=128)):  # noqa: B008
    policy = Oldest() if name == "no policy" else policy_for(name, model.config, 16)
    return ModelRunner(model, policy, budget if policy.needs_budget else None, chunk=64)


def has_read(runner, rows, seen):
    cache = runner.new_cache(rows=rows)
    prompt, _ = runner.prefill([place % VOCABULARY for place in range(seen)])
    for _ in range(rows):
        cache.admit(prompt)
    return cache


def held_tensors(cache):
    found = {}
    for layer in cache.layers:
        for name, tensor in {**layer.buffers, **layer.memory}.items():
            found[layer.index, name] = tuple(tensor.shape), tensor.dtype
    for i, placement in enumerate(cache.placements):
        for name, tensor in {"positions": placement.positions, **placement.state, **placement.memory}.items():
            found["placement", i, name] = tuple(tensor.shape), tensor.dtype
    return found


@pytest.mark.parametrize("seen", [40, SEEN])
@pytest.mark.parametrize("name", SLOTS)
@torch.no_grad()
def test_slots_are_as_after_reading(model, name, seen):
    runner = runner_for(model, name)
    cache, other = filled(runner, 2, seen), has_read(runner, 2, seen)
    assert held_tensors(cache) == held_tensors(other)
    assert cache.rows == other.rows
    policy = cache.policy
    for step in range(6):
        assert cache.nbytes() == cache.bytes_held
        assert cache.nbytes() == other.nbytes() + (cache.shift.nbytes() - other.shift.nbytes() if cache.shift else 0)
        assert [row.held for row in cache.rows] == [row.held for row in other.rows]
        for layer in range(cache.shape.layers):
            kept, theirs = cache.kept(layer, 1), other.kept(layer, 1)
            assert kept.shape == theirs.shape
            assert bool((kept.diff(dim=-1) > 0).all())
            assert int(kept.max()) < seen + step
            assert bool((kept[:, : min(policy.sinks, cache.rows[0].held)] == torch.arange(policy.sinks)).all())
        for one in (cache, other):
            assert bool(runner.forward(one, [[3], [4]], list(one.seen)).isfinite().all())
    assert cache.rows == other.rows


@pytest.mark.parametrize(("budget", "mean"), [(Budget(tokens=128), 128), (Budget(share=0.25), 75)])
@torch.no_grad()
def test_pages_hold_what_the_budget_comes_to(model, budget, mean):
    runner = runner_for(model, "dms", budget)
    cache = filled(runner, 2, SEEN)
    lengths = []
    for layer in cache.layers:
        for row in range(2):
            for head in cache.kept(layer.index, row):
                kept = head[head >= 0]
                assert bool((kept.diff() > 0).all())
                assert kept[-16:].tolist() == list(range(SEEN - 16, SEEN))
                lengths.append(len(kept))
        visible, length = layer.pool.visible.tolist(), layer.pool.length.tolist()
        assert visible == length
        assert layer.pool.pages * PAGE >= sum(length)
        assert bool((layer.pool.buffers["expiry"] > SEEN).sum() == sum(length))
    assert sum(lengths) / len(lengths) == pytest.approx(mean, abs=2)
    assert max(lengths) > 1.2 * min(lengths)
    assert cache.nbytes() == cache.bytes_held
    for step in range(20):
        assert bool(runner.forward(cache, [[3], [4]], list(cache.seen)).isfinite().all())
        assert cache.seen == [SEEN + step + 1] * 2
    assert cache.nbytes() == cache.bytes_held
    assert cache.rows[0].occupancy.largest < max(lengths) + 21


def test_what_is_more_than_random_numbers_is_refused(model):
    for name in ("indexmem_pp", "snapkv"):
        budget = Budget(tokens=200)
        with pytest.raises(UserError, match="by reading only"):
            filled(runner_for(model, name, budget), 1, SEEN)


def test_positions_are_distinct_and_include_what_is_protected():
    generator = torch.Generator().manual_seed(0)
    for held, seen, sinks, recent in [(1, 1, 4, 8), (10, 10, 4, 8), (30, 31, 4, 8), (30, 5000, 4, 8), (3, 90, 4, 8)]:
        found = positions(50, held, seen, sinks, recent, generator)
        assert found.shape == (50, held)
        assert bool((found.diff(dim=-1) > 0).all())
        assert 0 <= int(found.min()) <= int(found.max()) < seen
        assert bool((found[:, : min(sinks, held)] == torch.arange(min(sinks, held))).all())
        if held >= sinks + recent:
            assert bool((found[:, -(recent - 1) :] == torch.arange(seen - recent + 1, seen)).all())


@pytest.mark.parametrize("mean", [16, 40, 128, 290, 300])
def test_ragged_lengths_have_the_mean(mean):
    lengths = spread_lengths(12, mean, 300, 16)
    assert sum(lengths) / 12 == pytest.approx(mean, abs=1)
    assert min(lengths) >= 16
    assert max(lengths) <= 300


def test_the_random_gate_marks_what_its_calibration_says(model):
    policy = policy_for("dms", model.config, 16)
    shape = ModelShape.of(model.config)
    weight = gate(shape, 0)["weight"]
    assert weight.shape == (shape.layers, shape.kv_heads, shape.hidden_size)
    hidden = torch.randn(1, 4000, shape.hidden_size, generator=torch.Generator().manual_seed(5))
    for share in (0.2, 0.5, 0.8):
        threshold = policy.allot(share, 10**9)
        kept = (policy.read(0, "residual", hidden) <= threshold).float().mean()
        assert float(kept) == pytest.approx(share, abs=0.03)
