"""The project's own gate can fail: it catches six subtly wrong policies by the committed baseline of the right ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from evictbench import registry
from evictbench.policies import dms
from evictbench.store import run_folder
from studies import exact

ROOT = Path(__file__).resolve().parents[2]
BASELINE = ROOT / exact.BASELINE
FILE = Path(__file__).with_name("wrong_policies.py")
DMS_WEIGHTS = Path(str(dms.__file__)).with_name("weights") / "smollm2"

WRONG = [
    ("streaming_llm", "SinksDropped"),
    ("h2o", "WindowOffByOne"),
    ("h2o", "WrongGroup"),
    ("dms:window=8", "Unshifted"),
    ("h2o", "NoSum"),
    ("streaming_llm", "LateExpiry"),
]

Measure = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Runs a class of the file under a policy's settings on the gate's texts; the folder of its run. Once each."""
    runner, texts = exact.Runner(), exact.write_texts(tmp_path_factory.mktemp("texts"))
    measured: dict[str, Path] = {}

    def measure(right: str, cls: str) -> Path:
        if cls not in measured:
            name, colon, settings = right.partition(":")
            weights = str(DMS_WEIGHTS) if name == "dms" else None
            out = tmp_path_factory.mktemp(cls)
            measured[cls] = runner.run(exact.fidelity(f"{FILE}:{cls}{colon}{settings}", texts, out, weights))
        return measured[cls]

    return measure


def of_the_right_one(right: str) -> Path:
    folders = (BASELINE / "fidelity" / "smollm2").iterdir()
    (found,) = (folder for folder in folders if run_folder.read_run(folder)["identity"]["policy"]["label"] == right)
    return found


def gate(runs: Path, right: str, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "evictbench", "gate", runs, "--baseline", of_the_right_one(right), *words]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(("right", "cls"), WRONG, ids=[cls for _, cls in WRONG])
def test_a_wrong_policy_is_caught(measure: Measure, right: str, cls: str) -> None:
    code, said = gate(measure(right, cls), right, "--exact")
    assert code == 1, said
    assert "kl" in said


def test_a_right_policy_from_a_file_passes(measure: Measure) -> None:
    for words in (("--exact",), ()):
        code, said = gate(measure("h2o", "Unchanged"), "h2o", *words)
        assert code == 0, said


def test_a_worse_policy_fails_the_one_sided_gate(measure: Measure) -> None:
    code, said = gate(measure("h2o", "LeastAttended"), "h2o")
    assert code == 1, said
    assert "score" in said


def test_every_policy_has_a_baseline() -> None:
    ours = {entry.name for entry in entry_points(group=registry.POLICIES) if entry.value.startswith(registry.POLICIES)}
    assert {policy.partition(":")[0] for policy in exact.POLICIES} == ours
    for suite in ("fidelity", "ruler"):
        folders = (BASELINE / suite / "smollm2").iterdir()
        labels = [run_folder.read_run(folder)["identity"]["policy"]["label"] for folder in folders]
        assert sorted(labels) == sorted(exact.POLICIES)
