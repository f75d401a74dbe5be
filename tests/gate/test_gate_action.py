"""The GitHub action: its script as a shell runs it, and that what it installs is enough."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from gate.gate_cases import right, write_run

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "name" in step}
INSTALL, GATE = STEPS["Install evictbench"], STEPS["evictbench gate"]

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")


@pytest.fixture
def action(tmp_path):
    """Runs the gate's step with these inputs, the others at their defaults; its exit code, summary, outputs, stdout."""

    def call(**inputs):
        given = {name: str(about.get("default", "")) for name, about in ACTION["inputs"].items()} | inputs
        files = {name: tmp_path / name.lower() for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
        for file in files.values():
            file.write_text("")
        environment = {name: given[re.findall(r"inputs\.([\w-]+)", value)[0]] for name, value in GATE["env"].items()}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", GATE["run"]],
            env=os.environ | environment | {name: str(file) for name, file in files.items()} | {"PATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return (
            done.returncode,
            files["GITHUB_STEP_SUMMARY"].read_text(),
            files["GITHUB_OUTPUT"].read_text(),
            done.stdout,
        )

    return call


@needs_bash
@pytest.mark.parametrize(
    ("inputs", "code", "verdict", "heading"),
    [
        ({}, 1, "failed", "### evictbench gate: failed, 1 of 3"),
        ({"tolerance": "0.4"}, 0, "passed", "### evictbench gate: passed"),
        ({"arguments": "--where\nquestion=unseen\n", "tolerance": "0.4"}, 0, "passed", "### evictbench gate: passed"),
        ({"exact": "true"}, 1, "failed", "### evictbench gate: failed, 1 of 2"),
        ({"baseline": "nowhere; touch planted"}, 2, "unusable", "### evictbench gate: unusable"),
    ],
)
def test_the_step(action, tmp_path, inputs, code, verdict, heading):
    for side, count in (("results/runs", 40), ("there", 70)):
        write_run(tmp_path / side, right(count, 100))
    found, summary, output, said = action(**{"baseline": "there"} | inputs)
    assert found == code
    assert output == f"verdict={verdict}\n"
    assert summary.startswith(heading)
    assert summary.count("### ") == 1
    assert not (tmp_path / "planted").exists()
    if code == 2:
        assert "There is no baseline nowhere" in summary
        assert said.startswith("::error file=results/runs,title=evictbench gate::error: There is no baseline")
    else:
        assert (tmp_path / "evictbench-gate.xml").is_file()
        assert (tmp_path / "evictbench-gate.md").read_text() in summary


def test_every_input_is_used_and_every_one_that_is_used_is_there():
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text()))
    assert used == set(ACTION["inputs"])


def test_what_it_installs_is_enough(tmp_path):
    """The gate runs where no other dependency of the package can be imported."""
    installed = set(re.search(r"pandas .*", INSTALL["run"]).group().split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    assert installed <= declared | {"packaging"}
    modules = {name: name.replace("-", "_") for name in declared - installed} | {"lm-eval": "lm_eval"}
    for side in ("here", "there"):
        write_run(tmp_path / side, right(6, 10))
    script = f"""
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {sorted(modules.values())!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from evictbench.cli import app
app.main(["gate", {str(tmp_path / "here")!r}, "--baseline", {str(tmp_path / "there")!r}, "--policy", "h2o"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
