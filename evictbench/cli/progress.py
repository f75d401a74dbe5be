"""What is waited for, and how far a run is: a live line on a terminal, plain lines now and then in a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from evictbench.store.summary import tokens_per_second
from evictbench.terminal.console import loud
from evictbench.terminal.waiting import EVERY, Waiting, _plain, duration

if TYPE_CHECKING:
    from rich.console import Console

    from evictbench.evaluation.plan import Plan


LOOKING = "looking up policies, suites and the model"
"""What every command begins with; a policy that brings a network takes seconds to import."""


class ProgressLine:
    """Watches a run (`evictbench.evaluation.run.Watcher`) and writes to `console`: samples done, the running score,
    decode tokens per second, the time left. `describe` is called once, when all is checked. Use as a context
    manager."""

    def __init__(
        self,
        console: Console,
        describe: Callable[[Plan, int], None],
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
        """Say what is going on before the first sample."""
        self.waiting.begin(text)

    def planned(self, plan: Plan, finished: int) -> None:
        """Hand over to `describe`, with the live line out of its way."""
        self.waiting.end()
        self.describe(plan, finished)

    def warn(self, sentence: str) -> None:
        """Write a warning above the line."""
        loud(self.console).print(f"[yellow]warning:[/] {_plain(sentence)}", highlight=False, soft_wrap=True)

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
        elif self.clock() - self.written >= EVERY:
            self.written = self.clock()
            self.console.print(self.text(), highlight=False)
