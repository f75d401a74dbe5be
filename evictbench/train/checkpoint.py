"""Checkpoints and log of a training: each checkpoint is written whole or not at all, and found again after a kill."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.store.files import saving

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer

    from evictbench.policy.learner import Learner

LOG = "curves.jsonl"

_STATE_FILE, _MODEL_FOLDER = "learner.pt", "model"
_UNFINISHED = ".checkpoint-unfinished"


def save(
    folder: Path, steps: int, learner: Learner, optimiser: Optimizer | None, accelerator: Accelerator, model: bool
) -> None:
    """Write a checkpoint after `steps` finished steps, and remove earlier ones. Every process calls it.

    optimiser: the scorer's; None without parameters. model: whether the model itself is trained; accelerate then saves
    it and its optimiser, in shards if it has any. Every step seeds its own generators, so none is saved.
    """
    import torch

    unfinished = folder / _UNFINISHED
    if accelerator.is_main_process:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        state = {
            "steps": steps,
            "learner": learner.state_dict(),
            "optimiser": None if optimiser is None else optimiser.state_dict(),
        }
        with saving(unfinished / _STATE_FILE):
            torch.save(state, unfinished / _STATE_FILE)
    accelerator.wait_for_everyone()
    if model:
        accelerator.save_state(str(unfinished / _MODEL_FOLDER), safe_serialization=False)
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        before = _checkpoints(folder)
        unfinished.replace(folder / f"checkpoint-{steps}")
        for old in before:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def restore(folder: Path, learner: Learner, optimiser: Optimizer | None, accelerator: Accelerator, model: bool) -> int:
    """Load the last checkpoint into learner, optimisers and model; returns how many steps are finished, 0 without one.

    The arguments are those of `save`. Raises UserError for a checkpoint that cannot be read.
    """
    import torch

    checkpoints = _checkpoints(folder)
    if not checkpoints:
        return 0
    last = checkpoints[-1]
    try:
        state = torch.load(last / _STATE_FILE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(
            f"The checkpoint {last} cannot be read: {_STATE_FILE} is damaged, or holds more than the tensors and plain "
            "data that a training writes. Remove the checkpoint to start again."
        ) from error
    try:
        learner.load_state_dict(state["learner"])
        if optimiser is not None:
            optimiser.load_state_dict(state["optimiser"])
        steps = int(state["steps"])
        if model:
            accelerator.load_state(str(last / _MODEL_FOLDER))
    except (
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        EOFError,
        AttributeError,
        pickle.UnpicklingError,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"The checkpoint {last} does not fit ({reason}): remove it to start again.") from error
    return steps


def kept_steps(folder: Path) -> int:
    """The steps of the last checkpoint of a folder; 0 without one."""
    checkpoints = _checkpoints(folder)
    return int(checkpoints[-1].name.rpartition("-")[2]) if checkpoints else 0


def clear(folder: Path) -> None:
    """Remove the checkpoints of a finished training."""
    for old in _checkpoints(folder):
        shutil.rmtree(old)


def truncate_log(folder: Path, steps: int) -> None:
    """Keep only the first `steps` steps in the log: what was logged after the checkpoint comes again."""
    file = folder / LOG
    if file.is_file():
        lines = file.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if (entry := _parse(line)) and 0 < entry.get("step", 0) <= steps]
        unfinished = file.with_name(f".{LOG}-unfinished")
        unfinished.write_bytes(b"".join(kept))
        unfinished.replace(file)


def append_log(folder: Path, line: Mapping[str, Any]) -> None:
    """Add a line to the log."""
    with saving(folder / LOG), (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log, a torn one left out."""
    file = folder / LOG
    return [entry for line in file.read_bytes().splitlines() if (entry := _parse(line))] if file.is_file() else []


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints, oldest first. Raises UserError for a folder that looks like one and is none of ours."""
    by_steps = {}
    for path in folder.glob("checkpoint-*"):
        number = re.fullmatch(r"checkpoint-([0-9]{1,18})", path.name)
        if number is None or not path.is_dir():
            raise UserError(
                f"{path} is no checkpoint of this training, whose names end in the number of steps: move it away, or "
                "name another folder."
            )
        by_steps[int(number[1])] = path
    return [by_steps[steps] for steps in sorted(by_steps)]
