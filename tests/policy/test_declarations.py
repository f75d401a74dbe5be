"""A policy's class is checked when it is made: names, and what goes together."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from evictbench.errors import UserError
from evictbench.policy import HeadBudgetPolicy, MemoryTensor, ModelShape, Policy, RaggedPolicy, SlotTensor
from evictbench.policy.declarations import check_object

ANY_SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=8)


def nothing(self: Any, *arguments: Any) -> None:
    """A method that returns nothing."""


@pytest.mark.parametrize(
    ("base", "members", "sentence"),
    [
        (
            Policy,
            {"signals": frozenset({"massive"})},
            "declares the signal 'massive', which does not exist: did you me",
        ),
        (Policy, {"signals": frozenset({"hidden"})}, "declares the signal 'hidden', which does not exist: there are "),
        (Policy, {"signals": "mass"}, "declares signals='mass': write frozenset({...})."),
        (Policy, {"signals": frozenset({"mass"}), "static": True}, "is static and declares signals"),
        (Policy, {"granularity": "heads"}, "declares granularity='heads': it is head, layer, model."),
        (Policy, {"prefill": "native"}, "declares prefill='native': it is dense, bounded, sparse."),
        (Policy, {"prefill": "sparse"}, "declares prefill='sparse', which only HeadBudgetPolicy has."),
        (Policy, {"share_of": "prompt"}, "declares share_of='prompt': it is seen, cache."),
        (
            Policy,
            {"hooks": frozenset({"residual"})},
            "defines hooks, which only RaggedPolicy and HeadBudgetPolicy has.",
        ),
        (Policy, {"head_budgets": nothing}, "defines head_budgets, which only HeadBudgetPolicy has."),
        (Policy, {"charged_state": nothing}, "defines charged_state, which is now what the engine charges by itself"),
        (Policy, {"charge": nothing}, "defines charge, which the engine works out by itself."),
        (Policy, {"held_queries": nothing}, "defines held_queries, which the engine works out by itself."),
        (RaggedPolicy, {"signals": frozenset({"mass"})}, "defines signals, which only Policy has."),
        (RaggedPolicy, {"prefill": "sparse"}, "declares prefill='sparse', which only HeadBudgetPolicy has."),
        (HeadBudgetPolicy, {"allot": nothing}, "defines allot, which only RaggedPolicy has."),
        (HeadBudgetPolicy, {"observe": nothing}, "defines observe, which only Policy has."),
    ],
)
def test_a_class_that_cannot_work_is_refused(base: type[Any], members: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"The policy Mine {sentence}")):
        type("Mine", (base,), members)


STATE = {"mine": SlotTensor(torch.float32)}


@pytest.mark.parametrize(
    ("base", "members", "sentence"),
    [
        (Policy, {"signals": frozenset({"window_probs"})}, "declares window_probs and a window of 0 queries."),
        (
            Policy,
            {"slot_state": lambda self, shape: {"keys": STATE["mine"]}},
            "declares keys in slot_state: the cache ",
        ),
        (Policy, {"memory": lambda self, shape: STATE}, "declares mine in memory as a SlotTensor."),
        (
            Policy,
            {
                "slot_state": lambda self, shape: STATE,
                "memory": lambda self, shape: {"mine": MemoryTensor(torch.float32, (2,))},
            },
            "declares mine in memory: slot_state has that name.",
        ),
        (
            RaggedPolicy,
            {"hooks": frozenset({"normed_hiddens"})},
            "declares the activation 'normed_hiddens', which does not exist: did you mean normed_hidden?",
        ),
    ],
)
def test_an_object_that_cannot_work_is_refused(base: type[Any], members: dict[str, Any], sentence: str) -> None:
    mine = type("Mine", (base,), members)
    with pytest.raises(UserError, match=re.escape(f"The policy Mine {sentence}")):
        check_object(mine(), ANY_SHAPE)


def test_what_depends_on_settings_is_checked_in_the_object() -> None:
    class Mine(Policy):
        @property
        def signals(self) -> frozenset[str]:  # type: ignore[override]
            return frozenset({"mas"})

    with pytest.raises(UserError, match="the signal 'mas', which does not exist: did you mean mass"):
        check_object(Mine(), ANY_SHAPE)
