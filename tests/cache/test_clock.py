"""Laps add up to their pass, on the host's clock and on events; a clock changes nothing of what is computed."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from evictbench.cache import clock as clocks
from evictbench.cache.clock import ATTENTION, POLICY, REST, Clock, EventClock, NullClock, Times
from evictbench.generation.runner import ModelRunner
from evictbench.policies.full import Full
from evictbench.policies.h2o import H2O
from evictbench.policies.random import Random
from evictbench.policies.snapkv import SnapKV
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policy import Policy
from evictbench.policy.budget import Budget
from twin import tiny_model

CPU = torch.device("cpu")


class Ticking:
    """A clock that shows 1, 2, 4, 8, ... seconds, so that every lap has a length of its own."""

    def __init__(self) -> None:
        self.ticks = count()

    def perf_counter(self) -> float:
        return float(2 ** next(self.ticks))


def test_a_lap_belongs_to_the_part_that_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "time", Ticking())
    clock = Clock(CPU)
    clock.start()  # 1
    clock.lap(REST, CPU)  # 2
    clock.lap(POLICY, CPU)  # 4
    clock.lap(ATTENTION, CPU)  # 8
    look = clock.timed(lambda value: value + 1, CPU)
    assert look(1) == 2  # policy until 16, signals until 32
    clock.lap(POLICY, CPU)  # 64
    clock.stop()  # 128
    assert clock.read() == [Times(total=127e3, attention=4e3, signals=16e3, policy=2e3 + 8e3 + 32e3)]
    assert clock.read() == []


def test_a_pass_that_failed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "time", Ticking())
    clock = Clock(CPU)
    for failed in (False, True):
        clock.start()
        clock.lap(ATTENTION, CPU)
        clock.drop() if failed else clock.stop()
    assert [times.total for times in clock.read()] == [3e3]


class Event:
    """A CUDA event on a device whose time goes 1, 2, 4, ... ms; its device is waited for before it is asked."""

    waited: set[Any] = set()  # noqa: RUF012
    ticks = count()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, device: Any) -> None:
        self.device, self.at = device, 2 ** next(Event.ticks)

    def elapsed_time(self, later: Event) -> float:
        assert self.device == later.device, "events of two devices have no time between them"
        assert self.device in Event.waited
        return float(later.at - self.at)


def test_events_of_two_devices_are_read_after_one_wait_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []

    def wait(device: Any) -> None:
        waits.append(device)
        Event.waited.add(device)

    Event.waited, Event.ticks = set(), count()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    clock = EventClock(first)
    for _ in range(2):
        clock.start()  # 1
        clock.lap(REST, first)  # 2
        clock.lap(ATTENTION, first)  # 4
        clock.lap(REST, second)  # 8: on the way to the other device
        clock.lap(POLICY, second)  # 16
        clock.stop()  # 32
    assert waits == []
    one, other = clock.read()
    assert sorted(map(str, waits)) == ["cuda:0", "cuda:1"]
    assert (one.total, one.attention, one.policy, one.rest) == (31, 2, 8, 21)
    assert other == Times(64 * 31, 64 * 2, 0, 64 * 8)


POLICIES: list[tuple[Policy, str | None]] = [
    (Full(), None),
    (Random(Random.Config(recent=8)), "24"),
    (StreamingLLM(), "24"),
    (H2O(), "24"),
    (SnapKV(SnapKV.Config(window=4, kernel=3, decode="reselect")), "24"),
]


@pytest.mark.engine
@pytest.mark.parametrize(("policy", "budget"), POLICIES, ids=[policy.name for policy, _ in POLICIES])
def test_a_clock_changes_nothing(policy: Policy, budget: str | None) -> None:
    def run(clock: Clock) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        runner = ModelRunner(tiny_model(), policy, None if budget is None else Budget.parse(budget), chunk=7)
        logits = []
        with torch.inference_mode():
            cache = runner.new_cache(prompt_length=40)
            decode = runner.new_cache(rows=2)
            cache.clock = decode.clock = clock
            for start in range(0, 40, 10):
                logits.append(told(clock, lambda: runner.forward(cache, [list(range(start, start + 10))], [start])))  # noqa: B023
            decode.admit(cache)
            decode.admit(cache)
            for step in range(5):
                logits.append(told(clock, lambda: runner.forward(decode, [[step], [step + 3]], decode.seen)))  # noqa: B023
            return logits, [decode.kept(layer, row) for layer in range(2) for row in range(2)]

    def told(clock: Clock, work: Any) -> Any:
        if isinstance(clock, NullClock):
            return work()
        clock.start()
        result = work()
        clock.stop()
        return result

    plain, clock = run(NullClock()), Clock(CPU)
    timed = run(clock)
    for without, having in zip(plain, timed, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(without, having, strict=True))
    passes = clock.read()
    assert len(passes) == 9
    assert all(min(times.attention, times.policy, times.rest) > 0 for times in passes)
    assert (sum(times.signals for times in passes) > 0) == (policy.name == "snapkv")
