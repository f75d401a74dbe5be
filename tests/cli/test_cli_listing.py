"""--help, --version, list and doctor: what they say, and that they say it without anything heavy."""

import json
import subprocess
import sys

import pytest


@pytest.fixture
def evictbench(environment, tmp_path):
    def call(*words, **more):
        log = tmp_path / "heavy.json"
        done = subprocess.run(
            [sys.executable, "-m", "fake_command", *words],
            capture_output=True,
            text=True,
            env=environment | {"HEAVY_LOG": str(log)} | more,
            cwd=tmp_path,
            timeout=600,
            check=False,
        )
        return done, json.loads(log.read_text())

    return call


@pytest.mark.parametrize(
    ("words", "example"),
    [
        (("--help",), "evictbench run --policy"),
        (("--help",), "evictbench list policies"),
        (("--help",), "evictbench doctor"),
        (("run", "--help"), "evictbench run --policy h2o --budget 256 --suite ruler"),
        (("list", "--help"), "evictbench list policies"),
        (("list", "policies", "--help"), "evictbench list policies"),
        (("list", "suites", "--help"), "evictbench list suites"),
        (("list", "models", "--help"), "evictbench list models"),
        (("doctor", "--help"), "evictbench doctor"),
    ],
)
def test_help_shows_a_real_example_and_imports_nothing_heavy(evictbench, words, example):
    done, heavy = evictbench(*words)
    assert done.returncode == 0
    assert example in done.stdout
    assert heavy == []


def test_every_option_of_a_run_is_in_its_help_and_in_its_settings(evictbench):
    from dataclasses import fields

    from evictbench.evaluation.settings import RunSettings

    done, _ = evictbench("run", "--help")
    for field in fields(RunSettings):
        assert f"--{field.name.replace('_', '-')}" in done.stdout


def test_the_defaults_of_the_command_line_are_those_of_the_settings():
    import inspect
    from dataclasses import MISSING, fields

    from evictbench.cli.app import run
    from evictbench.evaluation.settings import RunSettings

    given = inspect.signature(run).parameters
    for field in fields(RunSettings):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        assert given[field.name].default == default, field.name


def test_the_version(evictbench):
    from evictbench import __version__

    done, heavy = evictbench("--version")
    assert done.stdout == f"evictbench {__version__}\n"
    assert heavy == []


def test_list_policies_names_them_with_their_settings_and_without_torch(evictbench):
    done, heavy = evictbench("list", "policies", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert {"full", "random", "streaming_llm", "tova", "h2o", "snapkv", "hoard"} <= rows.keys()
    assert rows["hoard"]["settings"]["size"] == 3
    assert rows["h2o"]["paper"] == "arXiv 2306.14048"
    assert rows["h2o"]["signals"] == ["mass"]
    assert rows["full"]["budget"] is False
    assert {row["prefill"] for row in rows.values() if "prefill" in row} == {"dense", "bounded", "sparse"}
    assert {row["shares"] for row in rows.values() if "shares" in row} <= {"head", "layer", "model"}
    assert heavy == []


def test_a_policy_that_does_not_load_does_not_hide_the_others(evictbench):
    done, _ = evictbench("list", "policies", COLUMNS="200")
    assert done.returncode == 0
    assert "fake_plugins_that_are_not_there" in done.stdout
    assert "streaming_llm" in done.stdout


def test_list_suites_names_their_tasks_without_torch(evictbench):
    done, heavy = evictbench("list", "suites", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["toy"]["tasks"] == ["toy_recall", "toy_pairs", "toy_songs"]
    assert len(rows["ruler"]["tasks"]) == 13
    assert heavy == []


def test_list_models_names_the_bundled_one_without_torch(evictbench):
    done, heavy = evictbench("list", "models")
    assert done.stdout.count("smollm2") >= 1
    assert heavy == []


def test_a_table_in_a_pipe_has_no_colours_and_keeps_its_lines(evictbench):
    done, _ = evictbench("list", "suites", COLUMNS="200")
    assert "\x1b" not in done.stdout
    assert any(line.lstrip().startswith("ruler") for line in done.stdout.splitlines())


def test_doctor_says_what_to_do(monkeypatch, capsys):
    from evictbench.cli import app, doctor

    found = [
        doctor.Check("torch", "ok", "torch is here."),
        doctor.Check("model", "missing", "No [model].", "Get one."),
    ]
    monkeypatch.setattr(doctor, "report", lambda: found)
    with pytest.raises(SystemExit) as ended:
        app.main(["doctor"])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "missing" in out
    assert "No [model]." in out
    assert "Get one." in out
    monkeypatch.setattr(doctor, "report", lambda: found[:1])
    with pytest.raises(SystemExit) as ended:
        app.main(["doctor", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)[0]["status"] == "ok"


def test_doctor_really_runs(evictbench):
    done, _ = evictbench("doctor", "--json", HF_HUB_OFFLINE="1")
    names = [check["name"] for check in json.loads(done.stdout)]
    assert "torch" in names
    assert done.returncode in (0, 1)
