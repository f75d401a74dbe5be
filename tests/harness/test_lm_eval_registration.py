"""lm-eval finds the model "evictbench" by name, and its own models beside it, in a process that has loaded neither."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOOK = """
from lm_eval.api.registry import get_model, model_registry
print("evictbench" in model_registry, get_model("dummy").__name__)
"""


@pytest.mark.parametrize(
    "registration",
    ["import evictbench.harness.model", "from evictbench.harness.cli import register; register()"],
    ids=["the import that the docs name", "the command line"],
)
def test_our_model_is_found_beside_lm_evals_own(registration: str) -> None:
    words = [sys.executable, "-c", registration + LOOK]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.split() == ["True", "DummyLM"], done.stderr[-2000:]
