"""The comparison with the twin finds what is subtly wrong: each of these policies must fail it."""

from __future__ import annotations

from collections.abc import Mapping
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

    def of_layer(self, layer: int, device: torch.device) -> tuple[Any, Tensor]:
        scorer, log_gamma = super().of_layer(layer, device)
        return scorer, torch.zeros_like(log_gamma)


class KeysAsCached(KVpopMLP):
    """Keys that are scored with their rotation."""

    def enter(self, entering: Entering) -> Mapping[str, Tensor]:
        turning_back = entering.turning_back
        assert turning_back is not None

        def not_at_all(*behind: int) -> tuple[Tensor, Tensor]:
            cos, sin = turning_back(*behind)
            return torch.ones_like(cos), torch.zeros_like(sin)

        return super().enter(replace(entering, turning_back=not_at_all))


class NextLayer(KVpop):
    """Another layer's scorer."""

    def of_layer(self, layer: int, device: torch.device) -> tuple[Any, Tensor]:
        return super().of_layer(1 - min(layer, 1), device)


class LateRead(KVpop):
    """A token is scored one query after it has left the window."""

    def prepare(self, step: Step) -> None:
        score_leaving(step, *self.of_layer(step.layer, step.keys.device), int(self.recent(0)) + 1)


class EarlyRead(KVpop):
    """A token is scored while it is still in the window, where that has room for it."""

    def prepare(self, step: Step) -> None:
        score_leaving(step, *self.of_layer(step.layer, step.keys.device), max(1, int(self.recent(0)) - 1))


class Forgetful(KVpop):
    """A memory that ends with every pass."""

    def prepare(self, step: Step) -> None:
        for name, tensor in self.memory(step.shape).items():
            step.memory[name].fill_(tensor.fill)
        super().prepare(step)


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
