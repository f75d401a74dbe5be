"""The comparison with DistillCache's twin finds what is subtly wrong: each of these policies must fail it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from random_distillcache_weights import policy_of
from test_distillcache_twin import ROUNDING, Showing, compare_features
from torch import Tensor
from twin_comparison import assert_found, check

from evictbench.policies.distillcache import DistillCache
from evictbench.policies.distillcache.features import RECENT, Totals, entropies, lengths
from evictbench.policy import Step
from twin.distillcache import distillcache_cases


class RingStays(DistillCache):
    """The ring is not gathered with the kept set: a slot keeps what its last holder got."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.before: Tensor | None = None

    def observe(self, step: Step) -> None:
        ring = step.shared["attention"]
        if step.layer == 0 and self.before is not None:
            slots = min(ring.shape[2], self.before.shape[2])
            ring[:, :, :slots] = self.before[:, :, :slots]
        super().observe(step)
        self.before = ring.clone()


class ByLayer(DistillCache):
    """Sums layer by layer, as wrong versions of them need."""

    def _add_waiting(self, step: Step) -> None:
        for one in list(step.carried["waiting"]):
            step.carried["waiting"] = [one]
            super()._add_waiting(step)


class VarianceOverLayers(ByLayer):
    """Of the layers' means instead of all heads."""

    def _add(self, step: Step, found: Totals) -> None:
        heads = step.shape.heads
        super()._add(step, replace(found, squares=(found.mass / heads).square() * heads))


class VarianceInLayers(ByLayer):
    """Of the heads in a layer, the mean of the layers."""

    def features(self, step: Step) -> Tensor:
        numbers: Tensor = super().features(step)
        within = step.carried["within"] / step.shape.layers
        return torch.stack((*numbers.unbind(-1)[:2], within.float(), *numbers.unbind(-1)[3:]), dim=-1)

    def _add(self, step: Step, found: Totals) -> None:
        heads = step.shape.heads
        within = found.squares / heads - (found.mass / heads).square()
        step.carried["within"] = step.carried.get("within", 0) + within
        super()._add(step, found)


class PlaceInText(DistillCache):
    """The original position over the text's length."""

    def features(self, step: Step) -> Tensor:
        numbers: Tensor = super().features(step)
        following = step.query_positions[:, -1, None] + 1
        numbers[..., 4] = step.positions[:, 0] / (following - 1).clamp(min=1)
        return numbers


class LastLayersNorm(DistillCache):
    """The value in the last layer alone."""

    def _write_ring(self, step: Step) -> None:
        totals = step.carried["totals"]
        step.carried["totals"] = replace(totals, norm=lengths(step.entered.values) * step.shape.layers)
        super()._write_ring(step)


class OtherLength(DistillCache):
    """A share of what is left of the cache where it should be one of the tokens seen, and the other way round."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.share_of = "cache" if self.config.length == "seen" else "seen"


class EntropyOfTheMean(DistillCache):
    """Of the heads' mean attention instead of the mean of their entropies."""

    def _write_ring(self, step: Step) -> None:
        totals, heads = step.carried["totals"], step.shape.layers * step.shape.heads
        rows = (totals.attention / heads).transpose(1, 2).contiguous()
        step.carried["totals"] = replace(totals, entropy=entropies(rows) * heads)
        super()._write_ring(step)


class LastChunk(DistillCache):
    """Of a prompt read in chunks the last chunk's attention."""

    def observe(self, step: Step) -> None:
        super().observe(replace(step, dense=False))


class ForgetsQueries(DistillCache):
    """Entropies of this pass's queries alone."""

    def observe(self, step: Step) -> None:
        if step.layer == 0:
            step.shared["attention"].zero_()
        super().observe(step)


class SixtyThree(Showing):
    """The ring is one query short; that shows in the features, and seldom in what is kept."""

    def features(self, step: Step) -> Tensor:
        last = int(step.query_positions.amax())
        step.shared["attention"][..., (last + 1) % RECENT] = 0
        found: Tensor = super().features(step)
        return found


class FirstOfGroup(DistillCache):
    """The first query head of each KV head stands for its group."""

    def observe(self, step: Step) -> None:
        mass = step.signals.mass
        assert mass is not None
        step.signals.mass = mass[:, :, :1].expand_as(mass).contiguous()
        super().observe(step)


class OneTooMany(DistillCache):
    """Cuts to the budget and forgets the next query's own entry."""

    def keep(self, budget: int, phase: Any) -> int | None:
        return budget


class RecentKept(DistillCache):
    """The most recent entry is protected."""

    def recent(self, budget: Tensor | int) -> Tensor | int:
        return 2


WRONG: list[type[DistillCache]] = [
    RingStays,
    VarianceOverLayers,
    VarianceInLayers,
    PlaceInText,
    LastLayersNorm,
    OtherLength,
    EntropyOfTheMean,
    LastChunk,
    ForgetsQueries,
    FirstOfGroup,
    OneTooMany,
    RecentKept,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda cls: cls.__name__)
def test_a_wrong_policy_is_found(wrong: type[DistillCache]) -> None:
    assert_found(lambda case: check(case, policy_of(case, wrong), exact=ROUNDING), given(case=distillcache_cases()))


def test_a_ring_one_query_short_is_found() -> None:
    assert_found(lambda case: compare_features(case, SixtyThree), given(case=distillcache_cases(long=True)))
