"""The comparison with the twin finds what is subtly wrong: each of these policies must fail it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from test_twin import ROUNDING, fitted
from test_twins import check
from torch import Tensor

from evictbench.policies.kvpop import KVpop, KVpopMLP
from evictbench.policies.kvpop.delayed import score_leaving
from evictbench.policy import Entering, Policy, Step
from twin.cases import Case, cases


class NoAge(KVpopMLP):
    """Scores that do not fall."""

    def of_layers(self, layers: range, device: torch.device) -> tuple[Any, Tensor]:
        scorer, log_gamma = super().of_layers(layers, device)
        return scorer, torch.zeros_like(log_gamma)


class KeysAsCached(KVpopMLP):
    """Keys that are scored with their rotation."""

    def _priority(self, entering: Sequence[Entering]) -> Tensor:
        turning_back = entering[0].turning_back
        assert turning_back is not None

        def not_at_all(*behind: int) -> tuple[Tensor, Tensor]:
            cos, sin = turning_back(*behind)
            return torch.ones_like(cos), torch.zeros_like(sin)

        return super()._priority([replace(one, turning_back=not_at_all) for one in entering])


class NextLayer(KVpop):
    """Another layer's scorer."""

    def of_layers(self, layers: range, device: torch.device) -> tuple[Any, Tensor]:
        found = [super(NextLayer, self).of_layers(range(1 - layer, 2 - layer), device) for layer in layers]
        if len(found) == 1:
            return found[0]
        heads = slice(0, self._kv_heads)
        whole = super().of_layers(layers, device)[0]
        swapped = {
            name: torch.cat([scorer.state_dict()[name][heads] for scorer, _ in found]) for name in whole.state_dict()
        }
        joined = type(whole).of(swapped, len(layers) * self._kv_heads, whole.head_dim, "swapped")
        return joined, torch.cat([log_gamma for _, log_gamma in found])


class LateRead(KVpop):
    """A token is scored one query after it has left the window."""

    def settle(self, steps: Sequence[Step]) -> None:
        layers = range(steps[0].layer, steps[-1].layer + 1)
        score_leaving(steps, *self.of_layers(layers, steps[0].keys.device), self.scored_after + 1)


class EarlyRead(KVpop):
    """A token is scored while it is still in the window, where that has room for it."""

    def settle(self, steps: Sequence[Step]) -> None:
        layers = range(steps[0].layer, steps[-1].layer + 1)
        score_leaving(steps, *self.of_layers(layers, steps[0].keys.device), max(1, self.scored_after - 1))


class Forgetful(KVpop):
    """A memory that ends with every pass."""

    def settle(self, steps: Sequence[Step]) -> None:
        for step in steps:
            for name, tensor in self.memory(step.shape).items():
                step.memory[name].fill_(tensor.fill)
        super().settle(steps)


@pytest.mark.parametrize("wrong", [NoAge, KeysAsCached, NextLayer, LateRead, EarlyRead, Forgetful])
def test_a_wrong_policy_is_found(wrong: type[Policy]) -> None:
    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases(wrong.name))
    def run(case: Case) -> None:
        check(case, fitted(case, wrong), exact=ROUNDING)

    with pytest.raises(AssertionError):
        run()
