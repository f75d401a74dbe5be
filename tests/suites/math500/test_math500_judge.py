"""The process that compares: nothing hangs it for long, any thread may ask it, and it does not outlive its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from evictbench.suites.math500.judge import Judge, Verdict

PATIENT = 300
"""Seconds in which the slowest machine compares two numbers."""


@pytest.fixture
def judge():
    judge = Judge(limit_seconds=PATIENT)
    yield judge
    judge.close()


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "99999999999!", "(" * 400 + "1" + ")" * 400])
def test_a_comparison_without_end_is_cut_off_and_the_next_one_works(judge, answer):
    judge.compare("1", "1.0")
    judge.limit_seconds = 3
    assert judge.compare("12", answer) == Verdict(equal=False, timed_out=True)
    judge.limit_seconds = PATIENT
    assert judge.compare(r"\frac{1}{2}", "0.5") == Verdict(equal=True, shown="1/2")


def test_any_thread_may_ask(judge):
    found: dict[int, bool] = {}

    def ask(number: int) -> None:
        found[number] = judge.compare(str(number), f"{number % 8}.0").equal

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number < 8 for number in range(16)}


def test_a_child_that_dies_is_replaced(judge):
    judge.compare("1", "2")
    first = judge._child.pid
    os.kill(first, signal.SIGKILL)
    judge._child.wait()
    assert judge.compare("1", "1.0").equal
    assert judge._child.pid != first
    judge.close()
    assert judge.compare("1", "1.0").equal


def test_unparsable_texts_are_unequal(judge):
    for text in ("", "\x00", "∑é", "\\", "{", "\\frac{1}{0}", "a\nb", '"', "\ud800"):
        assert judge.compare("1", text).equal is False
    assert judge.compare("1", "1.0").equal


SCRIPT = """
import os, sys, time
from evictbench.suites.math500 import judge
assert judge.compare("1", "1.0").equal
assert "sympy" not in sys.modules and "math_verify" not in sys.modules
print(judge._judges[os.getpid()]._child.pid, flush=True)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_it_ends_with_its_parent(killed):
    script = SCRIPT + ("time.sleep(60)" if killed else "")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        if killed:
            assert psutil.pid_exists(child)
            parent.kill()
        parent.wait(timeout=600)
    for _ in range(6000):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    raise AssertionError(f"process {child} is still there")


def test_a_fork_gets_a_judge_of_its_own():
    script = SCRIPT + (
        "pid = os.fork()\n"
        "assert judge.compare('2', '2.0').equal and len(judge._judges) == (1 if pid else 2)\n"
        "if not pid: judge._judges[os.getpid()].close(); os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0 and judge.compare('3', '3.0').equal\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600, capture_output=True)


def test_a_child_that_cannot_start_says_so(judge, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="is math-verify installed"):
        judge.compare("1", "2")
