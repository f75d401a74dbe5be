"""One real conversion of the bundled model, made by two processes at once, for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest


class Conversion(NamedTuple):
    cache: Path
    folder: Path
    outcomes: list[tuple[int, str, str]]


@pytest.fixture(scope="session")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """The bundled model in a cache of its own, and (exit code, stdout, stderr) of the two that converted it."""
    cache = tmp_path_factory.mktemp("cache")
    command = [sys.executable, "-m", "evictbench.models.bundled"]
    environment = os.environ | {"EVICTBENCH_CACHE": str(cache)}
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outcomes = []
    for process in both:
        stdout, stderr = process.communicate(timeout=600)
        outcomes.append((process.returncode, stdout, stderr))
    return Conversion(cache, next((cache / "models").glob("smollm2-*-v*/")), outcomes)


@pytest.fixture
def converted(conversion: Conversion, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the converted model, with the cache set to the one it is in."""
    monkeypatch.setenv("EVICTBENCH_CACHE", str(conversion.cache))
    return conversion.folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("EVICTBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
