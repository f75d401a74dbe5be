"""The guard around a policy's methods: wrong results, failures and writes end in a sentence with class and method."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from twin_comparison import forward

from evictbench.cache.base import KVCache
from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.policies.h2o import H2O
from evictbench.policies.tova import TOVA
from evictbench.policy import HeadBudgetPolicy, NewEntries, Policy, RaggedPolicy, SlotTensor, Step
from twin import tiny_model

Method = Callable[..., Any]
TEXT = list(range(1, 31))


def newest(self: Any, step: Step) -> Tensor:
    """A score that works."""
    return step.positions.float()


def scored(**members: Any) -> type[Policy]:
    return type("Mine", (Policy,), {"name": "mine", "score": newest, **members})


def in_decode(method: Method, otherwise: Method = newest) -> Method:
    """`method` in a pass of one token, and `otherwise` before."""
    return lambda self, step: (method if step.query_positions.shape[1] == 1 else otherwise)(self, step)


def state(**tensors: Any) -> Method:
    return lambda self, shape: tensors


def read_and_decode(policy: Any, prefill: str = "native") -> KVCache:
    """The cache after a prompt in two chunks, and three tokens, in inference mode as a run does it."""
    model = tiny_model()
    cache = new_cache(model, policy, 20, prefill=prefill, prompt_length=len(TEXT))  # type: ignore[arg-type]
    with torch.inference_mode():
        for tokens in (TEXT[:16], TEXT[16:], [3], [4], [5]):
            forward(model, cache, tokens)
    return cache


def undeclared(self: Any, step: Step) -> Tensor:
    mass: Any = step.signals.mass
    return mass.mean(2)


def doubled(name: str) -> Method:
    def observe(self: Any, step: Step) -> None:
        getattr(step, name).mul_(2)

    return observe


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"score": lambda self, step: None}, "score returned a NoneType instead of a tensor."),
        (
            {"score": lambda self, step: step.positions.float()[0]},
            "score returned a tensor of shape [2, 30] instead of",
        ),
        ({"score": lambda self, step: step.keys}, "score returned a tensor of shape [1, 2, 30, 16] instead of [1, 2, "),
        ({"score": lambda self, step: step.positions > 3}, "score returned bool instead of numbers."),
        (
            {"score": lambda self, step: newest(self, step) * torch.nan},
            "score returned 60 scores that are not a number",
        ),
        (
            {"score": in_decode(lambda self, step: newest(self, step) * torch.nan)},
            "score returned 40 scores that are n",
        ),
        ({"score": undeclared}, "score failed: AttributeError: the signal mass is read and not declared in `signals`."),
        ({"score": lambda self, step: step.signals.masses}, "score failed: AttributeError: there is no signal masses"),
        (
            {"score": lambda self, step: step.entered.labels + 1},
            "score failed: TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'; not declared, and so",
        ),
        ({"score": lambda self, step: step.keys @ step.keys}, "score failed: RuntimeError: "),
        (
            {"score": lambda self, step: self.absent},
            "score failed: AttributeError: 'Mine' object has no attribute 'abse",
        ),
        ({"observe": doubled("keys")}, "observe wrote to keys, values or positions that it may only read."),
        ({"observe": doubled("values")}, "observe wrote to keys, values or positions that it may only read."),
        ({"observe": doubled("positions")}, "observe wrote to keys, values or positions that it may only read."),
        ({"prepare": lambda self, step: step.values[:, :, 0].zero_()}, "prepare wrote to keys, values or positions"),
        ({"observe": in_decode(doubled("values"), lambda self, step: None)}, "observe wrote to keys, values or positi"),
        ({"keep": lambda self, budget, phase: budget + 1}, "keep returned 21 for a budget of 20, where a number from"),
        (
            {"keep": lambda self, budget, phase: budget / 2},
            "keep returned 10.0 for a budget of 20, where a number from",
        ),
        (
            {"slot_state": state(age=SlotTensor(torch.float32)), "enter": lambda self, new: {"ages": new.positions}},
            "enter returned ages where slot_state declares age.",
        ),
        (
            {"slot_state": state(age=SlotTensor(torch.float32)), "enter": lambda self, new: {"age": new.keys}},
            "enter returned for age a tensor of shape [1, 2, 16, 16] instead of [1, 2, 16].",
        ),
        (
            {"static": True, "expiry": lambda self, step: newest(self, step)},
            "expiry returned float32 instead of integer",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_scored_policy_that_is_wrong_ends_in_a_sentence(members: dict[str, Any], sentence: str) -> None:
    prefill = "bounded" if "expiry" in members else "native"
    with pytest.raises(UserError, match=re.escape(f"Mine.{sentence}")):
        read_and_decode(scored(**members)(), prefill)


def test_infinite_scores_have_an_order() -> None:
    """All are equal here, and of equal scores the earlier position is kept."""
    cache = read_and_decode(scored(score=lambda self, step: (newest(self, step) + 1) * torch.inf)())
    assert cache.kept(0)[0].tolist() == list(range(19))


def test_memory_that_runs_out_is_not_the_policy_s_fault() -> None:
    def no_memory(self: Any, step: Step) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        read_and_decode(scored(score=no_memory)())


class Marks(RaggedPolicy):
    """Every entry is seen for 20 tokens."""

    name = "marks"

    def expiry(self, entries: NewEntries) -> Tensor:
        rows, new = entries.positions.shape
        return torch.full((rows, entries.shape.kv_heads, 1 + new), 40, dtype=torch.int32)


def without_first(self: Any, entries: NewEntries) -> Tensor:
    return Marks.expiry(self, entries)[..., 1:]


def zeroed_values(self: Any, entries: NewEntries) -> Tensor:
    entries.values.zero_()
    return Marks.expiry(self, entries)


@pytest.mark.parametrize(
    ("expiry", "sentence"),
    [
        (without_first, "expiry returned a tensor of shape [1, 2, 16] instead of [1, 2, 17]."),
        (lambda self, entries: Marks.expiry(self, entries) / 2, "expiry returned float32 instead of integers."),
        (zeroed_values, "expiry wrote to keys, values or positions that it may only read."),
        (lambda self, entries: entries.activation.sum(), "not there: labels (needs_labels), unrotate_angles"),
    ],
)
def test_a_policy_with_expiries_that_is_wrong_ends_in_a_sentence(expiry: Method, sentence: str) -> None:
    wrong = type("Wrong", (Marks,), {"expiry": expiry})
    with pytest.raises(UserError, match=re.escape("Wrong.expiry ")) as error:
        read_and_decode(wrong())
    assert sentence in str(error.value)


class Pools(HeadBudgetPolicy):
    """Older entries are worse."""

    name = "pools"

    def recent(self, budget: Any) -> int:
        return 1

    def slot_state(self, shape: Any) -> Mapping[str, SlotTensor]:
        return {"worth": SlotTensor(torch.float32)}

    def features(self, entries: NewEntries) -> Mapping[str, Tensor]:
        return {"worth": entries.keys.float().sum(-1)}

    def score_at(self, state: Mapping[str, Tensor], age: Tensor) -> Tensor:
        return -age.float()

    def evicted_in_chunk(self, chunk: Any) -> Tensor:
        return torch.full_like(chunk.positions, 10**6)


@pytest.mark.parametrize(
    ("name", "method", "sentence"),
    [
        ("features", lambda self, new: {}, "returned nothing where slot_state declares worth."),
        ("features", lambda self, new: {"worth": new.keys}, "returned for worth a tensor of shape [1, 2, 16, 16] inst"),
        ("features", lambda self, new: {"worth": new.keys.sum(-1) * torch.nan}, "returned for worth 32 scores that a"),
        ("head_budgets", lambda self, given: torch.tensor([3, 5]), "returned 8 places in all, where a layer has 38."),
        ("head_budgets", lambda self, given: torch.tensor([-1, 39]), "returned a head with -1 places, of which 0 are "),
        ("head_budgets", lambda self, given: torch.ones(3), "returned a tensor of shape [3] instead of [2]."),
    ],
)
def test_a_policy_with_head_budgets_that_is_wrong_ends_in_a_sentence(name: str, method: Method, sentence: str) -> None:
    wrong = type("Wrong", (Pools,), {name: method})
    with pytest.raises(UserError, match=re.escape(f"Wrong.{name} {sentence}")):
        read_and_decode(wrong(), "dense")


def test_what_the_engine_shows_is_written_back_nowhere() -> None:
    """The right policies pass, twice with one object."""
    for policy in (TOVA(), H2O(), Marks(), Pools()):
        for _ in range(2):
            assert read_and_decode(policy, "dense").seen == [33]
