"""Showing a run while it goes on: a live line on a terminal, plain lines now and then in a file or a pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from evictbench.catalogue import loud
from evictbench.summary import tokens_per_second

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from evictbench.plan import Plan

EVERY = 15.0
"""Seconds between two plain lines."""


class Waiting:
    """In a file or a pipe, says what is waited for once it has taken `every` seconds, and again each time as long."""

    def __init__(self, console: Console, every: float = EVERY) -> None:
        self.console = console
        self.every = every
        self.timer: threading.Timer | None = None

    def begin(self, text: str) -> None:
        """Something begins, and what was waited for before has ended."""
        self.end()
        self._wait(text, time.monotonic())

    def end(self) -> None:
        """Nothing is waited for any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _wait(self, text: str, since: float) -> None:
        self.timer = timer = threading.Timer(self.every, lambda: self._say(timer, text, since))
        timer.daemon = True
        timer.start()

    def _say(self, timer: threading.Timer, text: str, since: float) -> None:
        if self.timer is timer:
            line = f"{text}, for {duration(time.monotonic() - since)} now"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            if self.timer is timer:  # it may have ended in the meantime
                self._wait(text, since)


class ProgressLine:
    """Watches a run (`evictbench.run.Watcher`) and writes to `console`: samples done, the running score, decode
    tokens per second, the time left. `describe` is called once, when all is checked. Use as a context manager."""

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
        self.live: Progress | None = None
        self.bar: TaskID | None = None
        self.waiting = Waiting(console)

    def __enter__(self) -> ProgressLine:
        if self.console.is_terminal and not self.console.quiet:
            from rich.progress import BarColumn, Progress, TextColumn

            self.live = Progress(
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                console=self.console,
                transient=True,
            )
            self.bar = self.live.add_task("starting", total=None)
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting.end()
        if self.live is not None:
            self.live.stop()
        elif self.session and self.written < self.began + self.elapsed():
            self.console.print(self.text(), highlight=False)

    def phase(self, text: str) -> None:
        """Say what is going on before the first sample."""
        if self.live is not None and self.bar is not None:
            self.live.update(self.bar, description=text)
        else:
            self.waiting.begin(text)

    def planned(self, plan: Plan, finished: int) -> None:
        """Hand over to `describe`, with the live line out of its way."""
        if self.live is not None:
            self.live.stop()
        self.describe(plan, finished)
        if self.live is not None:
            self.live.start()

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
        if self.live is not None and self.bar is not None:
            self.live.update(self.bar, total=self.total, completed=self.done, description=self.text())
        elif self.clock() - self.written >= EVERY:
            self.written = self.clock()
            self.console.print(self.text(), highlight=False)


def duration(seconds: float) -> str:
    """ "0:07", "3:12", "2:04:09"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
