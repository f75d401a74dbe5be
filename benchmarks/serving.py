"""An arm of a comparison as a process of its own, so that arms with other libraries take turns in one run.

Commands go to its standard input and answers come from its standard output, a line of JSON each. Standard library
only: both sides of a comparison import this.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


def serve(commands: Mapping[str, Callable[..., Answer]]) -> None:
    """Answer commands until standard input ends: {"do": "prefill", ...}, the rest are the command's arguments.

    All other output to standard output goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _write(answers, {"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = commands[command.pop("do")](**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        _write(answers, answer)


def _write(file: Any, answer: Answer) -> None:
    file.write(json.dumps(answer) + "\n")
    file.flush()


class ArmProcess:
    """The other end: starts the process, gives it commands one by one, and waits for each answer."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=folder
        )
        self._answer()

    def ask(self, do: str, **arguments: Any) -> Answer:
        """Give a command and return its answer. Raises RuntimeError for an error of the process, or if it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer, which says more
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}.")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer


class PeakMemory:
    """The most bytes that became resident inside the `with` block, beyond those at its beginning. Linux only."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
        # "5" makes the largest resident size start again from the present one.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _resident("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.nbytes = _resident("VmHWM") - self._before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}.")
