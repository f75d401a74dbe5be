"""A command in a process of its own, forked off the tests: what is imported stays imported, so it starts at once."""

import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Forked:
    pid: int
    files: tuple[Path, Path]
    status: int | None = None

    def poll(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def finish(self, seconds=600):
        """Exit code, stdout, stderr."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError("the command did not end")
            time.sleep(0.005)
        out, err = (file.read_text() for file in self.files)
        return self.status, out, err


def start(words, folder, before=lambda: None):
    """Fork and run `evictbench` with these words in `folder`; `before` is called in the new process."""
    number = time.monotonic_ns()
    files = (folder / f".out-{number}", folder / f".err-{number}")
    for file in files:  # here, so that they are there however soon the process is killed
        file.touch()
    pid = os.fork()
    if pid:
        return Forked(pid, files)
    code = 99
    try:
        for target, file in zip((1, 2), files, strict=True):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), target)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(folder)
        sys.argv = ["evictbench", *words]
        before()
        from evictbench.cli.app import main

        main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
