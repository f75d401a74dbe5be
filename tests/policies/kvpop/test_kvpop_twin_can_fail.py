"""The comparison with the twin finds what is subtly wrong: each of these policies must fail it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from test_kvpop_twin import ROUNDING, fitted
from torch import Tensor
from twin_comparison import assert_found, check

from evictbench.policies.kvpop import KVpop, KVpopMLP
from evictbench.policies.kvpop.delayed import score_leaving
from evictbench.policies.kvpop.protection import Protection
from evictbench.policy import NewEntries, Policy, Step
from twin.cases import cases


class NoAge(KVpopMLP):
    """Scores that do not fall."""

    def scorer_of_layers(self, layers: range, device: torch.device) -> tuple[Any, Tensor]:
        scorer, log_gamma = super().scorer_of_layers(layers, device)
        return scorer, torch.zeros_like(log_gamma)


class KeysAsCached(KVpopMLP):
    """Keys that are scored with their rotation."""

    def _priority(self, entering: Sequence[NewEntries]) -> Tensor:
        unrotate_angles = entering[0].unrotate_angles
        assert unrotate_angles is not None

        def not_at_all(*behind: int) -> tuple[Tensor, Tensor]:
            cos, sin = unrotate_angles(*behind)
            return torch.ones_like(cos), torch.zeros_like(sin)

        return super()._priority([replace(one, unrotate_angles=not_at_all) for one in entering])


class NextLayer(KVpop):
    """Another layer's scorer."""

    def scorer_of_layers(self, layers: range, device: torch.device) -> tuple[Any, Tensor]:
        found = [super(NextLayer, self).scorer_of_layers(range(1 - layer, 2 - layer), device) for layer in layers]
        if len(found) == 1:
            return found[0]
        heads = slice(0, self._kv_heads)
        whole = super().scorer_of_layers(layers, device)[0]
        swapped = {
            name: torch.cat([scorer.state_dict()[name][heads] for scorer, _ in found]) for name in whole.state_dict()
        }
        joined = type(whole).of(swapped, len(layers) * self._kv_heads, whole.head_dim, "swapped")
        return joined, torch.cat([log_gamma for _, log_gamma in found])


class LateRead(KVpop):
    """A token is scored one query after it has left the window."""

    def prepare_layers(self, steps: Sequence[Step]) -> None:
        layers = range(steps[0].layer, steps[-1].layer + 1)
        score_leaving(steps, *self.scorer_of_layers(layers, steps[0].keys.device), self.delay(steps[0]) + 1)


class EarlyRead(KVpop):
    """A token is scored while it is still in the window, where that has room for it."""

    def prepare_layers(self, steps: Sequence[Step]) -> None:
        layers = range(steps[0].layer, steps[-1].layer + 1)
        score_leaving(steps, *self.scorer_of_layers(layers, steps[0].keys.device), max(1, self.delay(steps[0]) - 1))


class NotWaiting(KVpop):
    """A token is scored as it leaves the window, where the weights were trained for the recent share as well."""

    @property
    def counted(self) -> Protection:
        return replace(self.protection, recent=0.0)


class Forgetful(KVpop):
    """A memory that ends with every pass."""

    def prepare_layers(self, steps: Sequence[Step]) -> None:
        for step in steps:
            for name, tensor in self.memory(step.shape).items():
                step.memory[name].fill_(tensor.fill)
        super().prepare_layers(steps)


@pytest.mark.parametrize("wrong", [NoAge, KeysAsCached, NextLayer, LateRead, EarlyRead, NotWaiting, Forgetful])
def test_a_wrong_policy_is_found(wrong: type[Policy]) -> None:
    assert_found(lambda case: check(case, fitted(case, wrong), exact=ROUNDING), given(case=cases(wrong.name)))
