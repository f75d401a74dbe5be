"""The time that each part of a forward pass takes: laps between moments that the engine marks.

A lap begins at one mark and ends at the next, which names the part that it belongs to. A cache has a `NullClock`, which
marks nothing, until its attribute `clock` is set. On a GPU a mark is a CUDA event, and nothing waits for it until the
times are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

ATTENTION, SIGNALS, POLICY, REST = "attention", "signals", "policy", "rest"
"""Parts of a pass: attention itself, with what its own softmax shows a policy; what else a policy asked to see; keeping
the cache, that is writing entries, scoring and evicting; all else, which is the model."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Times:
    """One pass, in milliseconds. rest: total less the others."""

    total: float
    attention: float = 0.0
    signals: float = 0.0
    policy: float = 0.0

    @property
    def rest(self) -> float:
        """All else."""
        return self.total - self.attention - self.signals - self.policy


class Clock:
    """The host's monotonic clock, for a model on the CPU."""

    def __init__(self, home: torch.device) -> None:
        self.home = home
        self._passes: list[list[tuple[str, torch.device, Any]]] = []

    def start(self) -> None:
        """A pass begins. What the one before spends after its `stop`, nobody is charged for."""
        self._passes.append([(REST, self.home, self._now(self.home))])

    def lap(self, part: str, device: torch.device) -> None:
        """Count the time since the last mark as time of `part` on this device."""
        self._passes[-1].append((part, device, self._now(device)))

    def stop(self) -> None:
        """A pass ends, on the device where it began."""
        self.lap(REST, self.home)

    def drop(self) -> None:
        """Forget the last pass, which failed."""
        self._passes.pop()

    def timed(self, signal: Callable[..., Result], device: torch.device) -> Callable[..., Result]:
        """The function `signal`, with its time marked as a signal's whenever the policy calls it."""

        def call(*arguments: Any, **named: Any) -> Result:
            self.lap(POLICY, device)
            result = signal(*arguments, **named)
            self.lap(SIGNALS, device)
            return result

        return call

    def read(self) -> list[Times]:
        """The times of all passes since the last reading, after waiting once for what is still under way."""
        self.wait()
        times = [self._times(marks) for marks in self._passes]
        self._passes = []
        return times

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""

    def _times(self, marks: list[tuple[str, torch.device, Any]]) -> Times:
        parts = dict.fromkeys((ATTENTION, SIGNALS, POLICY, REST), 0.0)
        for (_, before, began), (part, device, ended) in pairwise(marks):
            # Of a model over several devices each layer's marks lie on one; a lap between two is the model's.
            if device == before:
                parts[part] += self._between(began, ended)
        total = self._between(marks[0][2], marks[-1][2])
        return Times(total, parts[ATTENTION], parts[SIGNALS], parts[POLICY])

    def _now(self, device: torch.device) -> Any:
        return time.perf_counter()

    def _between(self, began: Any, ended: Any) -> float:
        return float(ended - began) * 1000


class NullClock(Clock):
    """A clock that marks nothing: what a cache has while nobody measures it."""

    def __init__(self) -> None:
        pass

    def lap(self, part: str, device: torch.device) -> None:
        """Nothing."""

    def timed(self, signal: Callable[..., Result], device: torch.device) -> Callable[..., Result]:
        """The function as it is."""
        return signal


class EventClock(Clock):
    """CUDA events on the stream of each device."""

    def wait(self) -> None:
        """Wait until every device has done all that it was given."""
        import torch

        devices = {self.home, *(device for marks in self._passes for _, device, _ in marks)}
        for device in devices:
            torch.cuda.synchronize(device)

    def _now(self, device: torch.device) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended))


def clock_for(device: torch.device) -> Clock:
    """The clock of a model whose input lies on this device."""
    return EventClock(device) if device.type == "cuda" else Clock(device)
