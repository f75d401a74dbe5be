"""Puts the fake suite, policy, model and generator where entry points find them."""

import os
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parents[1] / "run" / "fake_site"
sys.path.insert(0, str(SITE))


@pytest.fixture(autouse=True)
def fresh_entry_points():
    from evictbench import registry

    registry._entries.cache_clear()
    yield
    registry._entries.cache_clear()


@pytest.fixture
def environment():
    """The environment of a subprocess that finds the fakes."""
    path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
