"""What a policy is charged: one rule for all, in entries, and the bytes of the same state beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from twin_comparison import forward

from evictbench.cache.new_cache import new_cache
from evictbench.policies.distillcache import DistillCache
from evictbench.policies.full import Full
from evictbench.policies.h2o import H2O
from evictbench.policies.indexmem_pp import IndexMem
from evictbench.policies.kvpop import KVpop, KVpopMLP
from evictbench.policies.snapkv import SnapKV
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policies.tova import TOVA
from evictbench.policy import BasePolicy, MemoryTensor, ModelShape, Policy, SlotTensor
from evictbench.policy.charge import Charge
from twin import tiny_model

LLAMA_8B = ModelShape(layers=32, heads=32, kv_heads=8, head_dim=128)
SMOLLM2_135M = ModelShape(layers=30, heads=9, kv_heads=3, head_dim=64)


@pytest.mark.parametrize(
    ("policy", "on_8b", "on_135m"),
    [
        (Full(), 0, 0),
        (StreamingLLM(), 0, 0),
        (TOVA(), 0, 0),
        (H2O(), 0, 0),
        (H2O(H2O.Config(group="max")), 0, 0),
        (H2O(H2O.Config(shares="model")), 0, 0),
        (SnapKV(), 0, 0),  # holds no queries in decode
        (SnapKV(SnapKV.Config(decode="reselect")), 0, 0),  # one number with each entry, as H2O
        # 4 and 3 query heads a KV head, 32 queries, two of which take an entry
        (SnapKV(SnapKV.Config(decode="reselect", votes="window")), 64, 48),
        (SnapKV(SnapKV.Config(window=3, decode="reselect", votes="window")), 6, 4),
        (KVpop(), 64, 32),  # a matrix of head_dim x head_dim, as in the paper
        (KVpopMLP(), 0, 0),
        (IndexMem(), 0, 0),
        (DistillCache(), 0, 0),  # one ring for the whole model
    ],
)
def test_the_bundled_policies(policy: BasePolicy, on_8b: int, on_135m: int) -> None:
    assert policy.charge(LLAMA_8B) == Charge(fixed=on_8b)
    assert policy.charge(SMOLLM2_135M) == Charge(fixed=on_135m)


def newcomer(granularity: Any = "head", **tensors: Any) -> Policy:
    """A policy that declares these tensors, by the method that declares them."""
    methods = {name: (lambda self, shape, declared=declared: declared) for name, declared in tensors.items()}
    members = {"score": lambda self, step: step.positions.float(), "granularity": granularity, **methods}
    policy: Policy = type("Newcomer", (Policy,), {"name": "newcomer", **members})()
    return policy


def wide(numbers: int) -> dict[str, SlotTensor]:
    return {"wide": SlotTensor(torch.float16, width=numbers)}


def memory(*size: int) -> dict[str, MemoryTensor]:
    return {"memory": MemoryTensor(torch.float16, size)}


@pytest.mark.parametrize(
    ("policy", "charge"),
    [
        (newcomer(slot_state=wide(127)), Charge()),
        (newcomer(slot_state=wide(128)), Charge(per_entry=1)),  # another key and value with each entry
        (newcomer(slot_state=wide(300)), Charge(per_entry=2)),
        (newcomer(slot_state={"dense": SlotTensor(torch.float16, width=500, while_dense=True)}), Charge()),
        (newcomer(memory=memory(64)), Charge()),
        (newcomer(memory=memory(128)), Charge(fixed=1)),
        (newcomer(memory=memory(64, 64)), Charge(fixed=32)),
        (newcomer("layer", shared_state=memory(3, 128)), Charge(fixed=1)),  # three KV heads hold it together
        (newcomer("model", shared_state=memory(90, 128)), Charge(fixed=1)),  # 30 layers of three
        (newcomer("model", shared_state=memory(89, 128)), Charge()),
        (newcomer("layer", shared_state=wide(384)), Charge(per_entry=1)),
        (newcomer(slot_state=wide(100), memory=memory(200)), Charge(fixed=1)),
        (newcomer("head", slot_state=wide(100), shared_state={"more": SlotTensor(torch.bool, 28)}), Charge(0, 1)),
    ],
)
def test_a_newcomer_is_charged_without_knowing(policy: Policy, charge: Charge) -> None:
    assert policy.charge(SMOLLM2_135M) == charge


def test_a_charge_makes_the_budget_smaller() -> None:
    assert [Charge(10).slots(budget) for budget in (10, 11, 50)] == [0, 1, 40]
    assert [Charge(10, 1).slots(budget) for budget in (10, 11, 12, 13, 50)] == [0, 0, 1, 1, 20]
    assert [Charge(10, 1).cost(entries) for entries in (0, 1, 20)] == [10, 12, 50]


@pytest.mark.parametrize(
    ("policy", "slots", "numbers"),
    [
        (newcomer(), 20, 0),
        (newcomer(slot_state={"wide": SlotTensor(torch.float64, width=32)}), 10, 10 * 32),
        (newcomer(memory={"memory": MemoryTensor(torch.float64, (5, 32))}), 15, 5 * 32),
        (SnapKV(SnapKV.Config(window=4, decode="reselect", votes="window")), 16, 2 * 4 * 16),  # two query heads
    ],
)
def test_the_bytes_beside_the_charge(policy: Policy, slots: int, numbers: int) -> None:
    """Under a budget of 20 a cache holds fewer entries, and its bytes are those of the entries and of the state."""
    model = tiny_model()
    cache = new_cache(model, policy, 20, prefill="bounded")
    forward(model, cache, list(range(1, 31)))
    for token in range(12):
        forward(model, cache, [token])
    shape, occupancy = cache.shape, cache.rows[0].occupancy
    heads = shape.layers * shape.kv_heads
    assert occupancy.largest <= 20
    entries = heads * slots * (2 * shape.head_dim * 8 + 4) + heads * 8
    assert cache.nbytes() == entries + heads * numbers * 8
