"""Every way out is a sentence: signals, outputs that nobody takes, full disks, numbers and paths that cannot be."""

import errno
import os
import signal
import sys
from pathlib import Path

import pytest
from fake_plugins import install_fake_generator, make_model

from evictbench.cli import app, ending
from evictbench.store import files, run_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("models") / "tiny", weights=False))


@pytest.fixture
def main(monkeypatch, capsys, tmp_path):
    """Runs a command here: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["evictbench", *words])
        with pytest.raises(SystemExit) as ended:
            app.main(list(words))
        return ended.value.code, *capsys.readouterr()

    return call


RUN = ("run", "--policy", "h2o", "--budget", "16", "--suite", "toy")
SWEEP = ("sweep", "--policies", "h2o", "--budgets", "16", "--suites", "toy")
TRACE = ("trace", "--policies", "h2o", "--budget", "16", "--contexts", "64", "--model", "shape:smollm2-135m")
TRAIN = ("train", "--policy", "kvpop", "--data", "texts.txt", "--out", "trained")
GATE = ("gate", ".", "--baseline", "nowhere")
DIGITS = "9" * 400
ARABIC = "\u0662\u0665\u0666"
LONG = "a" * 300

BAD = [
    ((*RUN, "--budget", "1" + "0" * 30), "is more than 2,147,483,647 entries"),
    ((*RUN, "--budget", DIGITS), "is more than 2,147,483,647 entries"),
    ((*RUN, "--budget", "9" * 5000), "is more than 2,147,483,647 entries"),
    ((*RUN, "--budget", DIGITS + "%"), "is over 100%"),
    ((*RUN, "--budget", ARABIC), "is not a number"),
    ((*RUN, "--budget", ARABIC + "%"), "is not a number"),
    ((*SWEEP, "--budgets", ARABIC), "is not a number"),
    ((*TRACE, "--budget", f"16,{ARABIC}"), "is not a number"),
    ((*TRACE, "--contexts", ARABIC), "--contexts takes whole numbers from 1 to 2,147,483,647"),
    ((*TRACE, "--contexts", DIGITS), "--contexts takes whole numbers from 1 to 2,147,483,647"),
    ((*TRACE, "--batch-size", "9" * 5000), "--batch-size takes whole numbers from 1 to 2,147,483,647"),
    ((*TRAIN, "--budget", ARABIC), "--budget takes numbers of entries"),
    ((*TRAIN, "--budget", DIGITS), "--budget takes numbers of entries"),
    ((*RUN, "--limit", ARABIC), "'--limit': it takes a whole number, and not"),
    ((*RUN, "--limit", "1_000"), "'--limit': it takes a whole number, and not"),
    ((*RUN, "--limit", DIGITS), "'--limit': it takes a whole number up to 2,147,483,647"),
    ((*RUN, "--chunk", "9" * 5000), "'--chunk': it takes a whole number up to 2,147,483,647"),
    ((*RUN, "--max-new-tokens", ARABIC), "--max-new-tokens takes a number from 1 to 2,147,483,647"),
    ((*RUN, "--max-new-tokens", DIGITS), "--max-new-tokens takes a number from 1 to 2,147,483,647"),
    ((*RUN, "--temperature", "nan"), "'--temperature': it takes a finite number"),
    ((*RUN, "--top-p", "inf"), "'--top-p': it takes a finite number"),
    ((*RUN, "--temperature", "1e999"), "'--temperature': it takes a finite number"),
    ((*RUN, "--temperature", f"0.{ARABIC}"), "'--temperature': it takes a number"),
    ((*SWEEP, "--gpus-per-cell", "nan"), "'--gpus-per-cell': it takes a finite number"),
    ((*SWEEP, "--gpus-per-cell", "-inf"), "'--gpus-per-cell': it takes a finite number"),
    ((*GATE, "--latency-tolerance", "inf"), "'--latency-tolerance': it takes a finite number"),
    ((*GATE, "--tolerance", "nan"), "'--tolerance': it takes a finite number"),
    ((*TRAIN, "--lr", "infinity"), "'--lr': it takes a finite number"),
    *[
        ((*command, "--seed", str(seed)), "'--seed': it takes a whole number up to 9,223,372,036,854,775,807")
        for command in (RUN, SWEEP, TRACE, TRAIN)
        for seed in (2**63, 2**64, 10**400)
    ],
    (("run", "--policy", f"h2o:group={DIGITS}", "--budget", "16", "--suite", "toy"), "(400 characters)"),
    (("run", "--policy", f"random:seed={DIGITS}", "--budget", "16", "--suite", "toy"), "takes a whole number up to"),
    (("run", "--policy", f"random:seed={ARABIC}", "--budget", "16", "--suite", "toy"), "takes a whole number, and not"),
    (("run", "--policy", "random:seed=1_0", "--budget", "16", "--suite", "toy"), "takes a whole number, and not"),
    ((*RUN, "--out", LONG), "Results cannot be written to a"),
    ((*RUN, "--out", "b/" * 3000), "File name too long"),
    ((*RUN, "--data-dir", LONG), "File name too long"),
    ((*TRACE, "--out", f"x/{LONG}"), "A trace cannot be written to"),
    ((*TRAIN, "--out", LONG), "A training cannot be written to"),
    (("plot", ".", "--out", LONG), "Plots cannot be written to"),
    (("report", ".", "--out", f"{LONG}.html"), "The report cannot be written to"),
    (("gate", ".", "--baseline", ".", "--junit", f"{LONG}.xml"), "JUnit's XML cannot be written to"),
    ((*RUN, "--out", "caf\udce9"), "is not UTF-8"),
    ((*RUN, "--model", "caf\udce9"), "is not UTF-8"),
    (("report", "caf\udce9"), "is not UTF-8"),
    (("sweep", "twice.yaml"), "twice.yaml, line 5: the key limit is given twice"),
    (("sweep", "deep.yaml"), "is not YAML"),
    (("sweep", "large.yaml"), "takes no number as large as"),
    (("sweep", "larger.yaml"), "is not YAML"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_is_one_short_sentence_and_exit_code_2(main, words, sentence):
    Path("texts.txt").write_text("a text")
    Path("twice.yaml").write_text("policies: h2o\nbudgets: 16\nsuites: toy\nlimit: 2\nlimit: 3\n")
    Path("deep.yaml").write_text("[" * 20_000)
    Path("large.yaml").write_text(f"policies: h2o\nbudgets: 16\nsuites: toy\nlimit: {DIGITS}\n")
    Path("larger.yaml").write_text(f"policies: h2o\nlimit: {'9' * 5000}\n")
    code, out, err = main(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert sentence in err
    assert err.count("\n") == 1
    assert len(err) < 900


@pytest.mark.parametrize("seed", [2**63 - 1, 2**31])
def test_the_largest_seed_is_taken_by_every_generator(seed):
    import random

    import numpy as np
    import torch

    from evictbench.train.plan import derive_seed

    for number in (seed, seed + 1):
        torch.Generator().manual_seed(number)
    random.Random(seed)
    np.random.default_rng(seed)
    torch.Generator().manual_seed(derive_seed(seed, "noise"))


def test_a_working_folder_that_is_gone_is_a_sentence(main, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    code, out, err = main("list", "policies")
    assert (code, out) == (2, "")
    assert err == "error: The working folder is not there any more: change to another one.\n"


SIGNALS = [(signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize(
    ("words", "target", "sentence"),
    [
        (SWEEP, "evictbench.sweep.plan.plan_cells", "Stopped before the first sample. To go on: evictbench sweep"),
        (TRACE, "evictbench.trace.run.trace", "Stopped; 0 finished cells are kept in results/traces/"),
        (TRAIN, "evictbench.train.run.train", "Stopped; 700 of 1000 steps are kept in trained. To go on: evictbench"),
        (("plot", "."), "evictbench.cli.plot.drawings", "Stopped."),
    ],
)
def test_a_signal_ends_every_command_with_a_sentence(main, monkeypatch, words, target, sentence, number, code):
    def stop(*_, **__):
        os.kill(os.getpid(), number)
        return []

    Path("texts.txt").write_text("a text")
    (Path("trained") / "checkpoint-700").mkdir(parents=True)
    (Path("trained") / "train.json").write_text("{}")
    monkeypatch.setattr(target, stop)
    before = signal.getsignal(number)
    ended, _, err = main(*words)
    assert (ended, err.count("Traceback")) == (code, 0)
    assert err.splitlines()[-1].startswith(sentence)
    assert signal.getsignal(number) == before


def test_signals_of_one_ending_interrupt_once_and_one_that_is_ignored_stays_ignored(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ending.time, "monotonic", lambda: now[0])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending.Signals() as signals:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            now[0] += 60
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            assert [signals.exit_code(code) for code in (0, 1, 2, 130)] == [0, 1, 2, 143]
    finally:
        signal.signal(signal.SIGHUP, before)


class FullDisk:
    """Lets `lines` lines of samples through; after that the disk is full."""

    def __init__(self, lines):
        self.lines = lines
        self.append, self.mkstemp = files.append_line, files.tempfile.mkstemp

    def append_line(self, path, line):
        self.lines -= 1
        if self.lines < 0:
            raise files.not_written(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        self.append(path, line)

    def make(self, *words, **more):
        if self.lines < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.mkstemp(*words, **more)


def test_a_full_disk_names_path_count_and_the_command_to_go_on(main, model, monkeypatch):
    install = install_fake_generator
    import evictbench.evaluation.run as module

    monkeypatch.setattr(module, "load_generator", module.load_generator)  # put back after the test
    install()
    words = ("run", "--policy", "full", "--suite", "toy", "--model", model, "--limit", "3")
    disk = FullDisk(4)
    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "append_line", disk.append_line)
        patched.setattr(files.tempfile, "mkstemp", disk.make)
        code, _, err = main(*words, "--quiet")
    assert code == 1
    (folder,) = Path("results/runs/toy/tiny").iterdir()
    assert err == (
        f"error: {folder}/summary.json cannot be written: No space left on device. 4 finished samples are in {folder}. "
        f"To go on: evictbench {' '.join(words)} --quiet\n"
    )
    assert len(run_folder.read_samples(folder)) == 4
    code, _, err = main(*words)
    assert code == 0, err
    assert len(run_folder.read_samples(folder)) == 6


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
@pytest.mark.parametrize("words", [("list", "suites", "--quiet"), ("list", "suites"), ("--help",)])
def test_output_to_a_full_device_is_a_sentence(main, monkeypatch, words):
    with monkeypatch.context() as patched, open(os.devnull, "w") as spare:
        full = open("/dev/full", "w")  # noqa: SIM115  closed below, where that may fail
        patched.setattr(sys, "stdout", full)
        patched.setattr(ending, "_drop", lambda number: os.dup2(spare.fileno(), full.fileno()))
        code, _, err = main(*words)
        full.close()
    assert code == 1
    assert err == "error: The output cannot be written: No space left on device.\n"


@pytest.mark.parametrize("words", [("list", "suites", "--quiet"), ("list", "suites")])
def test_a_reader_that_has_gone_is_a_sentence(main, monkeypatch, words):
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patched, open(os.devnull, "w") as spare:
        broken = os.fdopen(writer, "w")
        patched.setattr(sys, "stdout", broken)
        patched.setattr(ending, "_drop", lambda number: os.dup2(spare.fileno(), broken.fileno()))
        code, _, err = main(*words)
        broken.close()
    assert code == 141
    assert err == "error: The reader of the output has closed it.\n"


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "no such backend", "qtagg"])
def test_commands_draw_whatever_backend_the_environment_names(main, monkeypatch, backend):
    """IPython names its own backend to every process that it starts, and the command's own Python may not have it."""
    import matplotlib as mpl
    from matplotlib import rcsetup

    monkeypatch.setenv("MPLBACKEND", backend)
    main("--version")
    assert rcsetup.validate_backend(os.environ["MPLBACKEND"]) == "agg"
    assert mpl.backends.backend_registry.resolve_backend(os.environ["MPLBACKEND"]) == ("agg", None)
