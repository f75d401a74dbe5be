"""Checkpoints that cannot be gone on from: a sentence of our own, and none of torch's advice to run what is in them."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evictbench.errors import UserError
from evictbench.train import checkpoint

pytestmark = pytest.mark.engine


class Touch:
    """What a pickle may do when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def restore(folder: Path) -> int:
    learner: Any = torch.nn.Linear(2, 1)
    return checkpoint.restore(folder, learner, None, SimpleNamespace(), False)  # type: ignore[arg-type]


def write(folder: Path, content: object) -> None:
    folder.mkdir()
    torch.save(content, folder / "learner.pt")


def test_the_last_checkpoint_is_the_one_of_most_steps(tmp_path: Path) -> None:
    state = torch.nn.Linear(2, 1).state_dict()
    for steps in (9, 100, 20):
        write(tmp_path / f"checkpoint-{steps}", {"steps": steps, "learner": state, "optimiser": None})
    assert restore(tmp_path) == 100


@pytest.mark.parametrize("name", ["checkpoint-best", "checkpoint-", "checkpoint-1.5", "checkpoint--3", "checkpoint-٣"])
def test_a_folder_with_another_name_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{name} is no checkpoint of this training, whose names end in the number"):
        restore(tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "learner.pt is damaged"),
        (b"PK\x03\x04", "learner.pt is damaged"),
        (None, "learner.pt is damaged"),
        ([1], "does not fit"),
        ({"steps": 3}, "does not fit"),
        ({"steps": "x", "learner": torch.nn.Linear(2, 1).state_dict()}, "does not fit"),
        ({"steps": 3, "learner": torch.nn.Linear(3, 1).state_dict()}, "does not fit"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_a_sentence(tmp_path: Path, content: object, sentence: str) -> None:
    folder = tmp_path / "checkpoint-3"
    if isinstance(content, bytes):
        folder.mkdir()
        (folder / "learner.pt").write_bytes(content)
    elif content is None:
        folder.mkdir()
    else:
        write(folder, content)
    with pytest.raises(UserError, match=f"The checkpoint {folder} .*{sentence}"):
        restore(tmp_path)


@pytest.mark.parametrize("save", [torch.save, lambda content, file: file.write_bytes(pickle.dumps(content))])
def test_code_in_a_checkpoint_is_not_run_and_not_advised(tmp_path: Path, save: Any) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    save({"steps": 3, "learner": Touch(tmp_path / "ran")}, tmp_path / "checkpoint-3" / "learner.pt")
    with pytest.raises(UserError) as refused:
        restore(tmp_path)
    assert "weights_only" not in str(refused.value)
    assert "holds more than the tensors and plain data" in str(refused.value)
    assert not (tmp_path / "ran").exists()
