"""DistillCache's hybrid against its twin: which entries each head goes on to see, the logits, and wrong versions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from random_distillcache_weights import policy_of
from test_distillcache_twin import ROUNDING
from twin_comparison import assert_found, assert_logits, examples, run_case

from evictbench.policies.distillcache import DistillCache, hybrid
from evictbench.policy import ModelShape, Step
from twin import distillcache as twin
from twin.cases import Case
from twin.distillcache import distillcache_cases
from twin.tiny import random_tokens


class Showing(DistillCache):
    """Keeps what each (layer, KV head) sees after each pass that ranked."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.shown: dict[int, dict[tuple[int, int], list[int]]] = {}

    def _hide(self, step: Step) -> None:
        super()._hide(step)
        positions, hidden, full = (
            tensor[0, 0].tolist() for tensor in (step.positions, step.shared["hidden"], step.shared["full"])
        )
        shape = step.shape
        self.shown[int(step.query_positions[0, -1]) + 1] = {
            divmod(head, shape.kv_heads): sorted(
                position
                for position, gone in zip(positions, hidden, strict=True)
                if position >= 0 and (full[head] or not gone)
            )
            for head in range(shape.layers * shape.kv_heads)
        }


def compare(case: Case, cls: type[Showing] = Showing) -> int:
    """How many sets were compared that hide something."""
    twin = case.trace()
    assume(twin.closest >= ROUNDING)
    policy = policy_of(case, cls)
    assert isinstance(policy, Showing)
    ours = run_case(case, policy)
    assert ours.tokens == twin.tokens
    hiding = 0
    for seen, sets in policy.shown.items():
        wanted = twin.kept[seen]
        assert sets == wanted, seen
        hiding += any(len(positions) < seen for positions in wanted.values())
    assert_logits(ours, twin)
    return hiding


@examples(80)
@given(case=distillcache_cases(hybrid=True))
def test_policy_equals_its_twin(case: Case) -> None:
    compare(case)


def test_sets_that_hide_something_equal_the_twins() -> None:
    rule = twin.DistillCache(heads="hybrid")
    case = Case(rule, "qwen3", 0, 2, 2, 2, False, False, tuple(random_tokens(60)), 10, 0.6, "native", 16, None)
    assert compare(case) >= 10


class NobodyFull(Showing):
    """No head sees what is hidden."""

    def head_mask(self, step: Step) -> Any:
        return step.shared["hidden"].expand(-1, step.shape.kv_heads, -1)


class ComesBack(Showing):
    """What was hidden is ranked again."""

    def _hide(self, step: Step) -> None:
        step.shared["hidden"].zero_()
        super()._hide(step)


class ChoosesAgain(Showing):
    """The heads that see everything are others after every pass."""

    def _hide(self, step: Step) -> None:
        step.shared["full"].zero_()
        super()._hide(step)


class PlaceAmongAll(Showing):
    """What is hidden counts in the place."""

    def features(self, step: Step) -> Any:
        numbers = super().features(step)
        from evictbench.policies.distillcache.features import relative_positions

        numbers[..., 4] = relative_positions(step.positions[:, 0])
        return numbers


class NextLayersHeads(Showing):
    """Another layer's heads see everything."""

    def head_mask(self, step: Step) -> Any:
        shape = step.shape
        full = step.shared["full"][:, 0].roll(shape.kv_heads, dims=-1)
        first = step.layer * shape.kv_heads
        return step.shared["hidden"] & ~full[:, first : first + shape.kv_heads, None]


@pytest.mark.parametrize("wrong", [NobodyFull, ComesBack, ChoosesAgain, PlaceAmongAll, NextLayersHeads])
def test_a_wrong_policy_is_found(wrong: type[Showing]) -> None:
    assert_found(lambda case: compare(case, wrong), given(case=distillcache_cases(hybrid=True)))


@pytest.mark.parametrize(("layers", "kv_heads"), [(2, 2), (5, 1), (3, 4), (30, 3), (36, 8)])
@pytest.mark.parametrize("share", [0.21, 0.25, 0.5])
def test_the_mean_over_heads_is_the_budget(layers: int, kv_heads: int, share: float) -> None:
    """And r' = (r - .2) / .8 where a fifth of the heads is a whole number of them."""
    shape = ModelShape(layers, kv_heads, kv_heads, 16)
    heads, full = layers * kv_heads, hybrid.full_heads(shape)
    assert full == heads // 5
    for seen in (400, 1000, 5000):
        budget = int(share * seen)
        others = hybrid.entries_for_others(budget, seen, shape)
        mean = (full * seen + (heads - full) * others) / heads
        assert budget - 1 < mean <= budget
        if heads % 5 == 0:
            assert others == pytest.approx((share - 0.2) / 0.8 * seen, abs=2)
