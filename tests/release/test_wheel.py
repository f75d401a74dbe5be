"""Wheel and source distribution, built from a copy of the working tree: everything that is needed, and nothing else."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEBIBYTE = 2**20
FOLDERS = ("evictbench", "policies", "suites", "results")


def tracked(*folders):
    """Files of the repository below these folders; all of them, where it is no git checkout."""
    if (ROOT / ".git").exists():
        done = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
        return {name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()}
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return {path.relative_to(ROOT).as_posix() for path in found if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The names in the wheel, those in the source distribution, and the wheel's file."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in sorted(tracked(".") if (ROOT / ".git").exists() else tracked(*(p.name for p in ROOT.iterdir()))):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if not name.endswith("/")}
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    return in_wheel, in_sdist, wheel


def test_wheel_holds_code_weights_suites_and_published_numbers(built):
    in_wheel, _, _ = built
    missing = []
    for name in tracked(*FOLDERS):
        if name.startswith("results/reference/") or name.endswith("/.gitignore"):
            continue
        installed = name if name.startswith("evictbench/") else f"evictbench/{name}"
        if installed not in in_wheel:
            missing.append(installed)
    assert not missing, sorted(missing)


def test_wheel_holds_nothing_of_tests_and_runs(built):
    in_wheel, _, _ = built
    tops = {name.partition("/")[0] for name in in_wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"evictbench"}
    assert not [name for name in in_wheel if "results/reference" in name or "results/runs" in name]


def test_wheel_carries_its_licence_and_notice(built):
    in_wheel, _, _ = built
    assert {"LICENSE", "NOTICE"} <= {Path(name).name for name in in_wheel if ".dist-info/licenses/" in name}


def test_wheel_is_below_twenty_megabytes(built):
    assert built[2].stat().st_size < 20 * MEBIBYTE


def test_source_distribution_holds_the_repository(built):
    _, in_sdist, _ = built
    assert tracked(".") <= in_sdist if (ROOT / ".git").exists() else {"MANIFEST.in", "Makefile"} <= in_sdist
