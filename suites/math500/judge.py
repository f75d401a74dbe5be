"""math-verify with a time limit: comparisons run in a child process, which is replaced if one takes too long.

math-verify's own limits are signals, which work in a main thread only, and not inside long integer arithmetic.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

LIMIT_SECONDS = 10.0
"""The limit of one comparison. Those that end take some hundredths of a second."""

START_SECONDS = 120.0
"""The limit for the child to start and import, which can take long from a network drive."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison. equal: whether math-verify takes the answers for equal. shown: the answer as it read
    it, "" if it could not. timed_out: the comparison did not end within the limit, or ended its process."""

    equal: bool
    shown: str = ""
    timed_out: bool = False


class Judge:
    """Compares answers in a child process of its own, from any thread, one at a time.

    The child starts with the first comparison. It ends with `close` or with this process, however that ends.
    """

    def __init__(self, limit_seconds: float = LIMIT_SECONDS):
        self.limit_seconds = limit_seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def compare(self, gold: str, answer: str) -> Verdict:
        """Compare two answers in LaTeX. Raises RuntimeError if the child cannot start."""
        with self._lock:
            child = self._child
            if child is None or child.poll() is not None:
                child = self._child = self._start()
            reply = _ask(child, json.dumps([gold, answer]), self.limit_seconds)
            if not reply:
                self._end()
                return Verdict(equal=False, timed_out=True)
        verdict = json.loads(reply)
        return Verdict(verdict["equal"], verdict["shown"])

    def close(self) -> None:
        """End the child; a later comparison starts another."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        # A new program rather than a fork, which is not safe beside threads and a GPU, or multiprocessing's spawn,
        # which runs the user's main module again. It has a session of its own, so Ctrl-C reaches the parent alone.
        child = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(int(self.limit_seconds) + 5)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, **_ONE_THREAD},
            start_new_session=True,
        )
        if _ask(child, None, START_SECONDS).strip() != "ready":
            child.kill()
            child.communicate()
            raise RuntimeError(
                f"the process that compares answers did not start (exit status {child.returncode}); "
                "is math-verify installed for this Python?"
            )
        return child

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _ask(child: subprocess.Popen[str], line: str | None, seconds: float) -> str:
    """The child's next line, after writing `line` to it; "" if the child ended, or was killed after `seconds`."""
    assert child.stdin is not None
    assert child.stdout is not None
    clock = threading.Timer(seconds, child.kill)
    clock.daemon = True
    clock.start()
    try:
        if line is not None:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        return child.stdout.readline()
    except BrokenPipeError:
        return ""
    finally:
        clock.cancel()


def versions() -> dict[str, str]:
    """The versions that verdicts depend on: math-verify, the ANTLR runtime, which chooses its parser, and sympy."""
    return {name: metadata.version(name) for name in ("math-verify", "antlr4-python3-runtime", "sympy")}


_judges: dict[int, Judge] = {}  # by process id: a fork must not share its parent's pipes
_making = threading.Lock()


def compare(gold: str, answer: str) -> Verdict:
    """Compare two answers with the judge of this process."""
    judge = _judges.get(os.getpid())
    if judge is None:
        with _making:
            judge = _judges.get(os.getpid())
            if judge is None:
                judge = _judges[os.getpid()] = Judge()
                atexit.register(judge.close)
    return judge.compare(gold, answer)
