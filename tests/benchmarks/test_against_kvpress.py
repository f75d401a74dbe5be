"""What drives both sides of the comparison with kvpress: processes that take turns, their memory, their ratios."""

import ast
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.against_kvpress import NUMBERS, command, compared, rate, seconds, spread, take_turns
from benchmarks.serving import ArmProcess, PeakMemory

ROOT = Path(__file__).parents[2]

ECHO = """
import os, sys
from benchmarks.serving import serve

def add(one, two):
    print("noise that is no answer")
    return {"sum": one + two}

def leave():
    os._exit(3)

serve({"add": add, "leave": leave})
"""


@pytest.fixture
def echo():
    arm = ArmProcess("echo", [sys.executable, "-c", ECHO], ROOT)
    yield arm
    arm.close()


def test_an_arm_answers_and_goes_on_after_an_error(echo):
    assert echo.ask("add", one=1, two=2) == {"sum": 3}
    with pytest.raises(RuntimeError, match="echo: TypeError"):
        echo.ask("add", one=1)
    assert echo.ask("add", one="a", two="b") == {"sum": "ab"}


def test_an_arm_that_ends_says_so(echo):
    with pytest.raises(RuntimeError, match="echo ended with exit code 3"):
        echo.ask("leave")


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_the_peak_counts_what_was_given_back_and_not_what_was_there_before():
    size = 64 * 2**20
    before = bytearray(b"x") * size
    with PeakMemory() as small:
        pass
    with PeakMemory() as large:
        given_back = bytearray(b"x") * size
        del given_back
    assert small.nbytes < size / 4
    # The kernel counts resident pages in batches: a few hundred kB may be missing.
    assert 0.98 * size < large.nbytes < 1.5 * size
    assert len(before) == size


def test_every_arm_once_then_every_arm_again(capsys):
    asked = []

    class Recorder:
        def __init__(self, name):
            self.name = name

        def ask(self, do, **arguments):
            asked.append((do, self.name, arguments))
            return {"seconds": float(len(asked))}

    rounds = take_turns({"a": Recorder("a"), "b": Recorder("b")}, 2, "prefill", ids="file")
    assert asked == [("prefill", name, {"ids": "file"}) for name in "abab"]
    assert {name: [seconds(one) for one in answers] for name, answers in rounds.items()} == {"a": [1, 3], "b": [2, 4]}


def test_ratios_are_of_medians_and_show_the_single_turns():
    rounds = {
        "ours": [{"seconds": 1.0, "tokens": n} for n in (20, 30, 10)],
        "theirs": [{"seconds": 2.0, "tokens": n} for n in (20, 20, 40)],
    }
    assert compared(rounds, "ours", "theirs", rate, 3.0) == ("2.00", "0.50 to 3.00", ">= 3: missed by 33.3%")
    assert compared(rounds, "theirs", "ours", seconds, 2.0) == ("2.00", "2.00 to 2.00", ">= 2: met")
    assert spread([3.0, 1.0, 2.0]) == "2.0 (1.0 to 3.0)"


def test_kvpress_side_imports_nothing_of_ours():
    for module in ("kvpress_arms", "serving"):
        tree = ast.parse((ROOT / "benchmarks" / f"{module}.py").read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [getattr(node, "module", None) or node.names[0].name for node in imports]
        assert names
        assert not [name for name in names if name.split(".")[0] in ("evictbench", "policies", "suites")]


def test_a_sections_command_repeats_what_was_changed():
    defaults = dict.fromkeys(NUMBERS, 5)
    options = Namespace(quick=False, defaults=defaults, **(defaults | {"slow_repeats": 1}))
    assert command(options, "decode") == 'make bench-kvpress KVPRESS_ARGS="--parts decode --slow-repeats 1"'
