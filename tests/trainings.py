"""What tests of whole trainings share: a watcher, a file of texts, and a training that breaks off in the middle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evictbench.train import loop


class TrainingWatcher:
    """Shows nothing, and keeps all that it was told."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.lines: list[dict[str, Any]] = []
        self.collections: list[tuple[int, int]] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def planned(self, plan: Any) -> None:
        self.plan = plan

    def collected(self, done: int, total: int) -> None:
        self.collections.append((done, total))

    def step(self, line: Any, steps: int) -> None:
        self.lines.append(dict(line))


def write_texts(file: Path, count: int = 24, words: int = 20) -> Path:
    """A file of `count` texts, the first of `words` words, each one word longer than the one before."""
    texts = [" ".join(f"word{(i * 7 + j) % 13}." for j in range(words + i)) for i in range(count)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def break_off(train: Callable[[], Any], step: int) -> None:
    """Run a training that fails as it begins this step."""
    whole_step = loop.Trainer._step

    def fail(self: Any, number: int, optimisers: Any) -> Any:
        if number == step:
            raise OSError("the machine went away")
        return whole_step(self, number, optimisers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "_step", fail)
        with pytest.raises(OSError, match="went away"):
            train()
