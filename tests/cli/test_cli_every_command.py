"""What all commands have in common: help, near names, plain text in a pipe, --quiet, and --json alone on stdout."""

import json
import sys
from pathlib import Path

import pytest
from fake_plugins import make_model
from plot.plot_records import retention, steps, write_grid, write_trace
from sweep.executor_in_process import InProcess
from typer.main import get_command

from evictbench import hub
from evictbench.cli import app, doctor
from evictbench.cli import sweep as sweep_command

TOY = f"{Path(__file__).parent.parent / 'train' / 'toy_policies.py'}:Toy"

CELL = "--limit 1 --batch-size 1 --device cpu --model MODEL"
LINES = {
    "run": f"run --policy h2o --budget 16 --suite toy {CELL}",
    "sweep": f"sweep --policies h2o --budgets 16 --suites toy {CELL}",
    "dry run": f"sweep --policies h2o --budgets 16 --suites toy {CELL} --dry-run",
    "trace": "trace --policies h2o --budget 16 --contexts 32 --new-tokens 4 --model MODEL",
    "train": f"train --policy {TOY} --data texts.jsonl --out out --model MODEL --steps 2 --budget 16 --window 4 "
    "--length 32 --device cpu",
    "plot": "plot runs --figures budget",
    "plot of a trace": "plot trace --figures latency",
    "report": "report runs --trace trace --documents 0",
    "gate": "gate runs --baseline baseline --junit gate.xml --markdown gate.md",
    "doctor": "doctor",
    "policies": "list policies",
    "suites": "list suites",
    "models": "list models",
    "published": "list published --policy kvpop",
}
WRITES = LINES.keys() - {"dry run", "doctor", "policies", "suites", "models", "published"}
NO_JSON = {"report"}


def leaves(command, words=()):
    """Every command with its words, subcommands included."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from leaves(inner, (*words, name))
    else:
        yield words, command


COMMANDS = dict(leaves(get_command(app.app)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def main(monkeypatch, capsys, tmp_path, model):
    """Runs a line in a folder with what it asks for: exit code, stdout, stderr."""
    for side in ("runs", "baseline"):
        write_grid(tmp_path / side)
    write_trace(tmp_path / "trace", steps(), retention())
    lines = [json.dumps({"text": f"word number {i} and word."}) + "\n" for i in range(30)]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setattr(hub, "why_unreachable", lambda timeout: None)
    monkeypatch.setattr(sweep_command, "_executor", lambda settings, how: (InProcess(), list(settings)))

    def call(line):
        words = line.replace("MODEL", str(model)).split()
        monkeypatch.setattr(sys, "argv", ["evictbench", *words])
        with pytest.raises(SystemExit) as ended:
            app.main(words)
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("name", LINES)
def test_in_a_pipe_there_is_plain_text_and_the_way_on(main, name):
    code, out, err = main(LINES[name])
    assert code == 0, err
    assert not {"\x1b", "\r"} & set(out + err)
    assert ("written to" in out) == (name in WRITES)
    assert ("next: " in out) == (name in WRITES | {"dry run"})
    for line in out.splitlines():
        if line.startswith("next: evictbench "):
            check_words(line.split()[2:])


@pytest.mark.parametrize("name", [name for name in LINES if name not in NO_JSON])
def test_json_stands_alone_on_stdout(main, name):
    code, out, err = main(f"{LINES[name]} --json")
    assert code == 0, err
    assert json.loads(out)
    code, out, err = main(f"{LINES[name]} --json --quiet")
    assert (code, err) == (0, "")
    assert json.loads(out)


@pytest.mark.parametrize("name", LINES)
def test_quiet_leaves_results_alone(main, name):
    code, out, err = main(f"{LINES[name]} --quiet")
    assert code == 0, err
    assert all(line.startswith("warning: ") for line in err.splitlines())
    assert "written to" not in out
    assert "next: " not in out


def check_words(words):
    """A command that is recommended is one, with options that it has."""
    command = COMMANDS[(words[0],)]
    known = {option for parameter in command.params for option in getattr(parameter, "opts", ())}
    assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_an_example_that_names_its_options(capsys, words):
    with pytest.raises(SystemExit) as ended:
        app.main([*words, "--help"])
    assert ended.value.code == 0
    assert "Example: evictbench " in capsys.readouterr().out
    line = COMMANDS[words].epilog.removeprefix("Example: evictbench ").split()
    assert tuple(line[: len(words)]) == words
    check = {option for parameter in COMMANDS[words].params for option in parameter.opts}
    assert {word for word in line if word.startswith("--")} <= check


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_is_named_for_a_word_near_it(capsys, words):
    options = [option for parameter in COMMANDS[words].params for option in parameter.opts if option[:2] == "--"]
    for option in options:
        wrong = option[:3] + option[4:]
        with pytest.raises(SystemExit) as ended:
            app.main([*words, wrong, "x"])
        out, err = capsys.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
        assert option in err.replace(wrong, "", 1)


def test_doctor_and_list_take_debug_as_all_others_do(monkeypatch):
    assert all("--debug" in {option for one in command.params for option in one.opts} for command in COMMANDS.values())
    monkeypatch.setattr(doctor, "report", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        app.main(["doctor", "--debug"])
