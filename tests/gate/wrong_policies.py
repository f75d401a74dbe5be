"""Policies that are wrong, six of them subtly, each under the name of the right one; and one that is right."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from evictbench.policies.dms import DMS
from evictbench.policies.h2o import H2O
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policy import GROUP_DIM, NewEntries, Step


class SinksDropped(StreamingLLM):
    """One sink fewer than asked for; the place goes to the window."""

    @property
    def sinks(self) -> int:
        return super().sinks - 1


class LateExpiry(StreamingLLM):
    """Every entry of a prompt's chunk is seen by one query too many."""

    def expiry(self, step: Step) -> Tensor:
        return super().expiry(step) + 1


class WindowOffByOne(H2O):
    """A recent window of one entry more, and a heavy hitter less."""

    def recent(self, budget: Tensor | int) -> Tensor | int:
        return budget // 2 + 1


class WrongGroup(H2O):
    """The largest of a group's query heads, and not their mean."""

    def observe(self, step: Step) -> None:
        assert step.signals.mass is not None
        step.state["mass"].add_(step.signals.mass.amax(GROUP_DIM))


class NoSum(H2O):
    """The last pass's attention, and not the running sum."""

    def observe(self, step: Step) -> None:
        step.state["mass"].zero_()
        super().observe(step)


class Unshifted(DMS):
    """In a prompt, a token's mark decides about the token itself, and not about the one before it."""

    def expiry(self, entries: NewEntries) -> Tensor:
        read = entries.activation
        assert read is not None
        own = read[:, :, [0, *range(read.shape[2] - 1)]]
        return super().expiry(replace(entries, activation=own))


class Unchanged(H2O):
    """Right, and from a file as the wrong ones are."""


class LeastAttended(H2O):
    """Keeps what has been attended to least."""

    def score(self, step: Step) -> Tensor:
        return -super().score(step)
