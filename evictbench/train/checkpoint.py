"""Where a training stands, on the disk: written whole or not at all, and found again after a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer

    from evictbench.policy.learner import Learner

LOG = "curves.jsonl"

_STATE, _MODEL = "learner.pt", "model"
_UNFINISHED = ".checkpoint-unfinished"


def save(
    folder: Path, steps: int, learner: Learner, optimiser: Optimizer | None, accelerator: Accelerator, model: bool
) -> None:
    """Keep what `steps` finished steps have made, and drop what was kept before. Every process calls it.

    model: whether the model itself is trained; accelerate then keeps it and its optimiser, in shards if it has any.
    Every step seeds its own generators, so there is no generator to keep.
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
        torch.save(state, unfinished / _STATE)
    accelerator.wait_for_everyone()
    if model:
        accelerator.save_state(str(unfinished / _MODEL), safe_serialization=False)
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        before = _found(folder)
        unfinished.replace(folder / f"checkpoint-{steps}")
        for old in before:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def restore(folder: Path, learner: Learner, optimiser: Optimizer | None, accelerator: Accelerator, model: bool) -> int:
    """Put learner, optimisers and model back where the last checkpoint has them; how many steps are finished."""
    import torch

    found = _found(folder)
    if not found:
        return 0
    try:
        state = torch.load(found[-1] / _STATE, map_location="cpu", weights_only=True)
        learner.load_state_dict(state["learner"])
        if optimiser is not None:
            optimiser.load_state_dict(state["optimiser"])
        if model:
            accelerator.load_state(str(found[-1] / _MODEL))
    except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"The checkpoint {found[-1]} cannot be read ({reason}): remove it to start again.") from error
    return int(state["steps"])


def clear(folder: Path) -> None:
    """Drop the checkpoints of a training that is finished."""
    for old in _found(folder):
        shutil.rmtree(old)


def cut_log(folder: Path, steps: int) -> None:
    """Leave the lines of the first `steps` steps in the log: what was logged after the checkpoint comes again."""
    file = folder / LOG
    if file.is_file():
        lines = file.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if (whole := _line(line)) and 0 < whole.get("step", 0) <= steps]
        unfinished = file.with_name(f".{LOG}-unfinished")
        unfinished.write_bytes(b"".join(kept))
        unfinished.replace(file)


def append(folder: Path, line: Mapping[str, Any]) -> None:
    """Add a line to the log."""
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log, a torn one left out."""
    file = folder / LOG
    return [whole for line in file.read_bytes().splitlines() if (whole := _line(line))] if file.is_file() else []


def _line(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _found(folder: Path) -> list[Path]:
    """The finished checkpoints, the last one last."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
