"""How a command ends before its end: by a signal, or because nobody takes its output."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended: 128 and the number of SIGINT."""

PIPE_CLOSED = 141
"""The exit code where the reader of the output has gone: 128 and the number of SIGPIPE."""

ONE_ENDING = 3.0
"""Seconds within which further signals belong to the same ending: a closed terminal sends several."""

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a stream that takes nothing more. An error of a file has the file's name; one of a stream has none."""


class Interrupted(Exception):
    """Ctrl-C, or a signal that does the same, has ended a command that had nothing to say about it."""


class Signals:
    """Makes SIGTERM and SIGHUP do what Ctrl-C does: KeyboardInterrupt, so that whatever is at work writes its summary,
    says what is kept, and ends. One that is ignored, as SIGHUP under nohup, stays ignored. Use as a context manager."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) == signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def exit_code(self, code: int) -> int:
        """The exit code of an ended command: 143 or 129 in place of 130 where SIGTERM or SIGHUP has ended it."""
        return 128 + self._received if code == INTERRUPTED and self._received is not None else code

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        first = self._received is None or now - self._at > ONE_ENDING
        self._received, self._at = self._received or number, now
        if number != signal.SIGTERM:
            _leave_dead_terminal()
        if first:
            raise KeyboardInterrupt


def broken_output(raised: Exception | None = None) -> tuple[str, int] | None:
    """A sentence and the exit code, if what was printed cannot be written to where stdout goes; else None.

    raised: the error that has ended the command, if one has. What is still to be written is dropped, so that nothing
    fails again at the interpreter's end.
    """
    own = isinstance(raised, OSError) and raised.filename is None and raised.errno in OF_OUTPUT
    broken = raised if own else None
    for number, stream in ((2, sys.stderr), (1, sys.stdout)):
        try:
            stream.flush()
        except OSError as error:
            broken = error
            _drop(number)
    if broken is None:
        return None
    assert isinstance(broken, OSError)
    if broken.errno == errno.EPIPE:
        return "The reader of the output has closed it.", PIPE_CLOSED
    return f"The output cannot be written: {broken.strerror or broken}.", 1


def ensure_streams() -> None:
    """Give a process that was started without stdout or stderr one that goes nowhere, and let a letter that an encoding
    lacks be written as its number rather than fail."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _leave_dead_terminal() -> None:
    """Drop what is written to a terminal that has been closed."""
    for number in (1, 2):
        try:
            os.write(number, b"")
        except OSError:
            _drop(number)


def _drop(number: int) -> None:
    """Let what is written to a file descriptor go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
