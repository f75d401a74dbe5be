"""A shape of two layers, and the command in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from evictbench.cli import app
from evictbench.models import machine, random_models

TINY = random_models.Shape(
    "llama",
    115_648,
    "float32",
    {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(random_models.SHAPES, "tiny", TINY)
    monkeypatch.setitem(machine.MOST_COPIED, "cpu", 2**20)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run a command in this process; its exit code, stdout and stderr."""

    def call(*arguments: Any) -> tuple[Any, str, str]:
        given = list(map(str, arguments))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["evictbench", *given])
        with pytest.raises(SystemExit) as ended:
            app.main(given)
        return ended.value.code, *capsys.readouterr()

    return call
