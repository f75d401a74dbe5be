"""What is shown while something takes long."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from evictbench.terminal.console import say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


EVERY = 15.0
"""Seconds between two plain lines."""


class Waiting:
    """Shows what is being waited for. On a terminal: a live line, which disappears at the end. In a file or a pipe: a
    line after `every` seconds (None: `EVERY`), and another each time as many have passed. Use as a context manager."""

    def __init__(self, console: Console, every: float | None = None) -> None:
        self.console = console
        self.every = EVERY if every is None else every
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
        """A step begins, and the one before has ended."""
        if self.on_screen:
            self._draw(text, None, None)
        else:
            self.end()
            self._wait(text, time.monotonic())

    def count(self, text: str, done: int, total: int) -> None:
        """Show on a terminal that `done` of `total` are done. Elsewhere the caller writes lines of its own."""
        if self.on_screen:
            self._draw(text, done, total)
        else:
            self.end()

    def timed(self, text: str) -> None:
        """A step begins whose time is measured: one line is written at once, and no thread runs beside the step."""
        self.end()
        if self.on_screen:
            from rich.text import Text

            self.still = True
            self.console.print(Text(f"{text} ..."), end="\r", no_wrap=True, overflow="ellipsis")
        else:
            say(self.console, f"{text} ...")

    def end(self) -> None:
        """Nothing is being waited for any more."""
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
            # Do not redirect what a command prints to stdout meanwhile: it may go to a file.
            self.live = Progress(*columns, console=self.console, transient=True, redirect_stdout=False)
            self.live.start()
        if self.bar is None or total is None:  # a bar with a total cannot lose it again: make a new one
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
            if self.timer is timer:  # the step may have ended in the meantime
                self._wait(text, since)


def duration(seconds: float) -> str:
    """ "0:07", "3:12", "2:04:09"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
