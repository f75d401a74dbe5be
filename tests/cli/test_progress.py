"""The live line and the plain lines."""

import io
import sys

from rich.console import Console

from evictbench.cli import run
from evictbench.cli.progress import ProgressLine
from evictbench.terminal import waiting
from evictbench.terminal.waiting import Waiting, duration


def line(score, task="a"):
    return {"task": task, "score": score, "decode_steps": 30, "decode_seconds": 0.5}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_line_says_done_score_speed_and_time_left():
    clock = Clock()
    progress = ProgressLine(Console(file=io.StringIO()), lambda *_: None, clock)
    progress.start([line(1.0), line(1.0)], total=10)
    clock.now += 6
    progress.sample(line(0.0))
    clock.now += 6
    progress.sample(line(0.0, task="b"))
    # 2 samples took 12 seconds, 6 are left; those from before took none of them.
    assert progress.text() == "4/10 done, score 33.3, 60 tok/s, 0:36 left"


def test_a_pipe_gets_a_plain_line_now_and_then_and_the_last(monkeypatch):
    monkeypatch.setattr(waiting, "EVERY", 15.0)
    clock, file = Clock(), io.StringIO()
    with ProgressLine(Console(file=file), lambda *_: None, clock) as progress:
        progress.start([], total=200)
        for _ in range(100):
            clock.now += 1
            progress.sample(line(1.0))
    written = file.getvalue().splitlines()
    assert len(written) == 100 // 15 + 1
    assert written[-1].startswith("100/200 done, score 100.0")
    assert "\x1b" not in file.getvalue()


def test_a_terminal_gets_a_live_line():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with ProgressLine(console, lambda *_: None) as progress:
        progress.phase("loading the weights")
        progress.start([], total=2)
        progress.sample(line(1.0))
        progress.waiting.live.refresh()
    assert "1/2 done, score 100.0" in file.getvalue()


def test_the_live_line_is_out_of_the_way_while_the_run_is_described():
    running = []
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with ProgressLine(console, lambda *_: running.append(progress.waiting.live)) as progress:
        progress.phase("making the prompts")
        assert progress.waiting.live.live.is_started
        progress.planned(None, 0)
        progress.phase("loading the weights")
        assert progress.waiting.live.live.is_started
    assert running == [None]


def test_warnings_are_not_read_as_markup():
    file = io.StringIO()
    progress = ProgressLine(Console(file=file), lambda *_: None)
    progress.warn("a [b] c")
    assert file.getvalue() == "warning: a [b] c\n"


def test_durations():
    assert [duration(7), duration(192.4), duration(7449)] == ["0:07", "3:12", "2:04:09"]


def test_sizes_are_in_units_that_people_read():
    sizes = [0, 999, 2000, 11_796_480, 99_960, 5e9, 2.5e12]
    shown = ["0 B", "999 B", "2 kB", "11.8 MB", "100 kB", "5 GB", "2.5 TB"]
    assert [run.human_bytes(size) for size in sizes] == shown


def test_what_is_waited_for_has_no_end_though_what_was_counted_before_had_one():
    waiting = Waiting(Console(file=io.StringIO(), force_terminal=True, width=100))
    with waiting:
        waiting.count("features of 6 of 6 blocks", 6, 6)
        assert waiting.live.tasks[0].total == 6
        waiting.begin("calibrating [all]")
        assert [(task.description, task.total) for task in waiting.live.tasks] == [("calibrating [all]", None)]
        assert "calibrating [all]" in waiting.console.file.getvalue()
    assert waiting.live is None


def test_stdout_is_left_alone_while_a_line_is_live():
    before = sys.stdout
    with Waiting(Console(file=io.StringIO(), force_terminal=True)) as waiting:
        waiting.begin("reading")
        assert sys.stdout is before
