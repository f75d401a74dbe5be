"""The comparison with the twins finds what is subtly wrong: each of these policies must fail it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from twin_comparison import assert_found, check

from evictbench.policies.h2o import H2O
from evictbench.policies.random import Random, priority
from evictbench.policies.snapkv import SnapKV
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policies.tova import TOVA
from evictbench.policy import GROUP_DIM, NewEntries, Policy, Step
from twin.cases import cases


class LateExpiry(StreamingLLM):
    """Every entry of a chunk is seen by one query too many."""

    def expiry(self, step: Step) -> Tensor:
        return super().expiry(step) + 1


class SinksDropped(StreamingLLM):
    """One sink fewer than asked for."""

    @property
    def sinks(self) -> int:
        return max(0, super().sinks - 1)


class OneTooMany(TOVA):
    """Cuts to the budget and forgets the next query's own entry."""

    def keep(self, budget: int, phase: Any) -> int | None:
        return budget


class FirstHeadOnly(TOVA):
    """Each KV head's first query head instead of all."""

    def score(self, step: Step) -> Tensor:
        assert step.signals.last_query_probs is not None
        return step.signals.last_query_probs.select(GROUP_DIM, 0).mean(1, keepdim=True)


class NoSum(H2O):
    """The last pass's attention instead of the running sum."""

    def observe(self, step: Step) -> None:
        step.state["mass"].zero_()
        super().observe(step)


class WrongGroup(H2O):
    """The maximum over the group, whatever the setting."""

    def score(self, step: Step) -> Tensor:
        assert step.signals.mass is not None
        return step.state["mass"] if self.config.group == "max" else step.signals.mass.amax(GROUP_DIM)


class ShortRecent(H2O):
    """A recent window that leaves out the next query's own entry."""

    def recent(self, budget: Tensor | int) -> Tensor | int:
        return budget // 2 + 1


class LastingVotes(SnapKV):
    """Running votes do not fade."""

    def _later_votes(self, step: Step) -> Any:
        return super()._later_votes(step)[0], 1.0


class UnpooledVotes(SnapKV):
    """No pooling."""

    def score(self, step: Step) -> Tensor:
        object.__setattr__(self, "config", SnapKV.Config(**{**vars(self.config), "kernel": 1}))
        return super().score(step)


class OtherPriority(Random):
    """Head and layer change places in the hash."""

    def enter(self, entering: NewEntries) -> Any:
        heads, layer = range(entering.shape.kv_heads), entering.layer
        values = [
            [[priority(self.config.seed, head, layer, int(p)) for p in row] for head in heads]
            for row in entering.positions
        ]
        return {"priority": torch.tensor(values)}


WRONG: list[tuple[str, type[Policy]]] = [
    ("streaming_llm", LateExpiry),
    ("streaming_llm", SinksDropped),
    ("tova", OneTooMany),
    ("tova", FirstHeadOnly),
    ("h2o", NoSum),
    ("h2o", WrongGroup),
    ("h2o", ShortRecent),
    ("snapkv", UnpooledVotes),
    ("snapkv", LastingVotes),
    ("random", OtherPriority),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_policy_is_found(name: str, wrong: type[Policy]) -> None:
    strategy = cases(name, priority=priority) if name == "random" else cases(name)

    assert_found(lambda case: check(case, wrong(wrong.Config(**case.settings))), given(case=strategy))
