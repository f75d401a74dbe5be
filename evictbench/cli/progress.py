"""The progress of a run: a live line on a terminal, a plain line now and then in a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from evictbench.store.summary import tokens_per_second
from evictbench.terminal import waiting
from evictbench.terminal.console import warn
from evictbench.terminal.waiting import Waiting, duration

if TYPE_CHECKING:
    from rich.console import Console

    from evictbench.evaluation.plan import RunPlan


LOOKING = "looking up policies, suites and the model"
"""The first phase of every command; a policy with a network takes seconds to import."""


class ProgressLine:
    """Follows a run (`evictbench.evaluation.run.Watcher`) and writes to `console`: samples done, the score so far,
    decode tokens per second, the time left. Use as a context manager.

    describe: called once, when everything is checked, with the plan and the number of finished samples.
    clock: returns seconds.
    """

    def __init__(
        self,
        console: Console,
        describe: Callable[[RunPlan, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.describe = describe
        self.clock = clock
        self.total = self.done = self.before = 0
        self.began = self.written = 0.0
        self.scores: dict[str, list[float]] = {}
        self.session: list[dict[str, float]] = []
        self.waiting = Waiting(console)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting.end()
        if not self.waiting.on_screen and self.session and self.written < self.began + self.elapsed():
            self.console.print(self.text(), highlight=False)

    def phase(self, text: str) -> None:
        """Show a step before the first sample."""
        self.waiting.begin(text)

    def planned(self, plan: RunPlan, finished: int) -> None:
        """Remove the live line and call `describe`."""
        self.waiting.end()
        self.describe(plan, finished)

    def warn(self, sentence: str) -> None:
        """Write a warning above the line."""
        warn(self.console, sentence)

    def start(self, finished: Sequence[dict[str, Any]], total: int) -> None:
        """Begin to count."""
        self.waiting.end()
        self.total = total
        self.done = self.before = len(finished)
        for line in finished:
            self.scores.setdefault(line["task"], []).append(line["score"])
        self.began = self.written = self.clock()
        self._show()

    def sample(self, line: dict[str, Any]) -> None:
        """Count one sample."""
        self.done += 1
        self.scores.setdefault(line["task"], []).append(line["score"])
        self.session.append({name: line[name] for name in ("decode_steps", "decode_seconds")})
        self._show()

    def elapsed(self) -> float:
        """Seconds since generation began."""
        return self.clock() - self.began

    def text(self) -> str:
        """The line: "12/200 done, score 83.3, 41 tok/s, 3:12 left"."""
        parts = [f"{self.done}/{self.total} done"]
        if self.scores:
            means = [sum(scores) / len(scores) for scores in self.scores.values()]
            parts.append(f"score {100 * sum(means) / len(means):.1f}")
        speed = tokens_per_second(self.session)
        if speed is not None:
            parts.append(f"{speed:.3g} tok/s" if speed < 100 else f"{speed:.0f} tok/s")
        made = self.done - self.before
        if made and self.done < self.total:
            parts.append(f"{duration(self.elapsed() / made * (self.total - self.done))} left")
        return ", ".join(parts)

    def _show(self) -> None:
        if self.waiting.on_screen:
            self.waiting.count(self.text(), self.done, self.total)
        elif self.clock() - self.written >= waiting.EVERY:
            self.written = self.clock()
            self.console.print(self.text(), highlight=False)
