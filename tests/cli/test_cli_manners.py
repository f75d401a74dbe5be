"""What every command says and does not say: --quiet, --json, no colours in a pipe, the near name of a wrong one."""

import json
import sys
import time

import pandas as pd
import pytest
from rich.console import Console

from evictbench.cli import app, doctor, gate, plot
from evictbench.cli.progress import ProgressLine
from evictbench.cli.sweep_output import SweepTable
from evictbench.gate.finding import Finding
from evictbench.terminal import console
from evictbench.terminal.waiting import Waiting


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs a command here: exit code, stdout, stderr."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["evictbench", *words])
        with pytest.raises(SystemExit) as ended:
            app.main(list(words))
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("rum", "run"),
        ("list polcies", "policies"),
        ("run --polcy h2o", "--policy"),
        ("sweep --budgts 4", "--budgets"),
        ("trace --contxts 4", "--contexts"),
        ("train --polcy a", "--policy"),
        ("plot --metrc x", "--metric"),
        ("report --titel x", "--title"),
        ("gate --baselin x", "--baseline"),
        ("doctor --jsn", "--json"),
    ],
)
def test_a_wrong_command_or_option_is_told_the_near_one(main, words, near):
    code, out, err = main(*words.split())
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert near in err.replace(words.split()[-1], "", 1)


@pytest.mark.parametrize("command", ["run", "sweep", "trace", "train", "plot", "gate", "doctor", "list policies"])
def test_whatever_prints_a_table_can_be_quiet_and_can_print_json(main, command):
    code, out, _ = main(*command.split(), "--help")
    assert code == 0
    assert "--json" in out
    assert "--quiet" in out


def test_a_quiet_list_is_its_names(main):
    _, out, _ = main("list", "policies", "--json")
    assert main("list", "policies", "--quiet") == (0, "".join(f"{row['name']}\n" for row in json.loads(out)), "")


def test_a_quiet_doctor_says_what_is_not_in_order(main, monkeypatch):
    found = [doctor.Check("torch", "ok", "torch is here."), doctor.Check("hub", "warn", "No hub.", "Wait.")]
    monkeypatch.setattr(doctor, "report", lambda: found)
    code, out, _ = main("doctor", "--quiet")
    assert code == 0
    assert "No hub." in out
    assert "torch" not in out


@pytest.mark.parametrize("terminal", [True, False])
def test_a_quiet_run_and_sweep_write_their_warnings_alone(capsys, terminal):
    quiet = Console(stderr=True, quiet=True, force_terminal=terminal)
    with ProgressLine(quiet, lambda plan, finished: None) as progress:
        progress.phase("loading")
        progress.start([], 2)
        progress.sample({"task": "a", "score": 1.0, "decode_steps": 1, "decode_seconds": 1.0})
        progress.warn("The prompts are cut.")
    with SweepTable(quiet) as table:
        table.phase("planning")
        table.warn("One cell is slow.")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "warning: The prompts are cut.\nwarning: One cell is slow.\n"


@pytest.mark.parametrize("variable", ["NO_COLOR", None])
def test_no_colours_in_a_pipe_nor_where_they_are_not_wanted(monkeypatch, variable):
    if variable:
        monkeypatch.setenv(variable, "1")
        found = Console(force_terminal=True)
        assert found.no_color
    else:
        found = console.console_for(stderr=False)
    with found.capture() as capture:
        found.print("[red]missing[/]")
    assert "\x1b[31m" not in capture.get()
    assert "missing" in capture.get()


def test_the_numbers_of_a_figure_as_json_keep_their_digits_and_have_null_for_nothing():
    frame = pd.DataFrame({"panel": ["", ""], "budget": [1, 2], "score": [1 / 3, float("nan")], "none": [None, None]})
    assert json.loads(plot.json_of([("budget", "Budget", frame)])) == [
        {
            "name": "budget",
            "title": "Budget",
            "rows": [{"budget": 1, "score": pytest.approx(1 / 3, abs=1e-14)}, {"budget": 2, "score": None}],
        }
    ]


def test_a_quiet_gate_says_what_fails_and_the_verdict():
    def finding(status, fails):
        numbers = dict.fromkeys(("here", "there", "difference", "low", "high", "p"))
        return Finding(status, f"h2o @ {status}", "ruler", "vt", "score", **numbers, samples=3, why="So.", fails=fails)

    lines = gate.in_short([finding("passed", False), finding("failed", True)]).splitlines()
    assert lines == ["failed: h2o @ failed on ruler, vt, score: So.", "failed, 1 of 2 (1 passed, 1 failed)"]


def test_in_a_pipe_a_long_wait_says_what_it_waits_for_until_it_ends(capsys):
    waiting = Waiting(Console(stderr=True), every=0.02)
    waiting.begin("loading the weights")
    deadline = time.monotonic() + 600
    said = ""
    while said.count("\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
        said += capsys.readouterr().err
    waiting.begin("reading")
    waiting.end()
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
    assert said.startswith("loading the weights, for 0:00 now\nloading the weights, for 0:0")
