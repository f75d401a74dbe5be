"""What is waited for, and how far a run is: a live line on a terminal, plain lines now and then in a file or a pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from evictbench.console import loud, say
from evictbench.summary import tokens_per_second

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from evictbench.plan import Plan

EVERY = 15.0
"""Seconds between two plain lines."""

LOOKING = "looking up policies, suites and the model"
"""What every command begins with; a policy that brings a network takes seconds to import."""


class Waiting:
    """Says what is waited for. On a terminal: a live line, gone when it ends. In a file or a pipe: a line once it has
    taken `every` seconds, and again each time as long. Use as a context manager."""

    def __init__(self, console: Console, every: float = EVERY) -> None:
        self.console = console
        self.every = every
        self.timer: threading.Timer | None = None
        self.live: Progress | None = None
        self.bar: TaskID | None = None
        self.still = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def on_screen(self) -> bool:
        """Whether there is a terminal to show a live line on."""
        return self.console.is_terminal and not self.console.quiet

    def begin(self, text: str) -> None:
        """Something begins, and what was waited for before has ended."""
        if self.on_screen:
            self._draw(text, None, None)
        else:
            self.end()
            self._wait(text, time.monotonic())

    def count(self, text: str, done: int, total: int) -> None:
        """Show on a terminal that so much is done; elsewhere, whoever counts writes lines of its own."""
        if self.on_screen:
            self._draw(text, done, total)
        else:
            self.end()

    def timed(self, text: str) -> None:
        """Something begins whose time is taken: one line, at once, with no thread to keep it alive beside."""
        self.end()
        if self.on_screen:
            from rich.text import Text

            self.still = True
            self.console.print(Text(f"{text} ..."), end="\r", no_wrap=True, overflow="ellipsis")
        else:
            say(self.console, f"{text} ...")

    def end(self) -> None:
        """Nothing is waited for any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.live is not None:
            self.live.stop()
            self.live = self.bar = None
        if self.still:
            from rich.control import Control
            from rich.segment import ControlType

            self.still = False
            self.console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))

    def _draw(self, text: str, done: int | None, total: int | None) -> None:
        if self.live is None:
            from rich.progress import BarColumn, Progress, TextColumn

            self.end()
            columns = BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)
            # What a command prints to stdout meanwhile is not the line's to move: it may go to a file.
            self.live = Progress(*columns, console=self.console, transient=True, redirect_stdout=False)
            self.live.start()
        if self.bar is None or total is None:  # a bar that knew its end does not forget it
            if self.bar is not None:
                self.live.remove_task(self.bar)
            self.bar = self.live.add_task(text, total=total, completed=done or 0)
        else:
            self.live.update(self.bar, total=total, completed=done, description=text)

    def _wait(self, text: str, since: float) -> None:
        self.timer = timer = threading.Timer(self.every, lambda: self._say(timer, text, since))
        timer.daemon = True
        timer.start()

    def _say(self, timer: threading.Timer, text: str, since: float) -> None:
        if self.timer is timer:
            say(self.console, f"{text}, for {duration(time.monotonic() - since)} now")
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


def duration(seconds: float) -> str:
    """ "0:07", "3:12", "2:04:09"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
