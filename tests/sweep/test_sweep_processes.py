"""A sweep with its worker process: killed, stopped by Ctrl-C, gone on with; and a worker that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

from evictbench.store import run_folder


@pytest.fixture
def start(model, environment, tmp_path):
    """Starts `evictbench sweep` in a session of its own, as a terminal does."""
    started = []

    def start(*words, **more):
        line = [sys.executable, "-m", "fake_command", "sweep", "--suites", "toy", "--model", model, "--out", "runs"]
        process = subprocess.Popen(
            [*line, "--device", "cpu", "--batch-size", "1", *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def count(root):
    return sum(file.read_bytes().count(b"\n") for file in root.glob("toy/tiny/*/samples.jsonl"))


def note(root):
    """The worker that is answering, where there is one."""
    for file in root.glob("toy/tiny/*/.phase"):
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        if found["phase"] == "answering" and psutil.pid_exists(found["pid"]):  # one that was killed leaves its note
            return found
    return None


def wait_for(condition, process, seconds=600):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        found = condition()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"it did not come to that: {process.communicate()}")


def test_a_sweep_goes_on_after_its_worker_and_itself_are_killed_and_after_ctrl_c(start, tmp_path):
    """A killed worker takes its cell with it and no other; what is killed or stopped goes on where it was."""
    root = tmp_path / "runs"
    words = ("--policies", "h2o,tova", "--budgets", "16", "--limit", "24")
    first = start(*words)
    found = wait_for(lambda: count(root) >= 5 and note(root), first)
    os.kill(found["pid"], signal.SIGKILL)
    found = wait_for(lambda: list(root.glob("toy/tiny/h2o-*/samples.jsonl")) and note(root), first)
    worker = psutil.Process(found["pid"])
    first.kill()
    _, err = first.communicate()
    worker.wait(600)  # it does not outlive who it works for
    assert "failed: full on toy: The worker process was killed by signal 9" in err
    (failed,) = root.glob("toy/tiny/full-*")
    assert "signal 9" in (failed / "failure.txt").read_text()
    kept = count(root)
    assert 6 <= kept <= 96

    second = start(*words)
    found = wait_for(lambda: count(root) >= kept + 10 and note(root), second)
    worker = psutil.Process(found["pid"])
    os.killpg(second.pid, signal.SIGINT)
    _, err = second.communicate(timeout=600)
    assert second.returncode == 130, err
    assert "Traceback" not in err
    assert not worker.is_running()
    kept = count(root)
    assert f"Stopped; {kept} finished samples are kept. To go on: evictbench sweep --suites toy" in err
    assert kept < 144

    third = start(*words, "--json")
    out, err = third.communicate(timeout=600)
    assert third.returncode == 0, err
    assert [row["samples"] for row in json.loads(out)] == [48, 48, 48]
    assert list(root.rglob("failure.txt")) == list(root.rglob(".phase")) == []
    for file in root.glob("toy/tiny/*/samples.jsonl"):
        keys = Counter(run_folder.key_of(json.loads(line)) for line in file.read_text().splitlines())
        assert len(keys) == 48
        assert set(keys.values()) == {1}
