"""The fake suite, policy, model and generator, for the tests that ask for them and for no others."""

import os
from pathlib import Path

import pytest

SITE = Path(__file__).parent / "fake_site"
"""The folder of the modules (on the path of every test) and, in `installed`, of their entry points."""


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Their entry points are there, and gone again afterwards."""
    from evictbench import registry

    monkeypatch.syspath_prepend(str(SITE / "installed"))
    registry._entries.cache_clear()
    yield
    registry._entries.cache_clear()


@pytest.fixture
def environment():
    """The environment of a subprocess that finds them."""
    path = os.pathsep.join([str(SITE), str(SITE / "installed"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
