"""Where a sample was made: library versions, commit, device."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIBRARIES = ("evictbench", "torch", "transformers", "tokenizers", "lm-eval", "datasets", "numpy")


def versions() -> dict[str, str]:
    """Python's version and that of each library that can move a score; those not installed are left out."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit that evictbench runs from, with "+changes" if its files differ from it; None outside git."""
    here = Path(__file__).resolve().parent
    head = _git(here, "rev-parse", "HEAD")
    inside = _git(here, "ls-files", "--error-unmatch", "environment.py")
    if not head or not inside:
        return None
    return head + ("+changes" if _git(here.parent, "status", "--porcelain", "--untracked-files=no") else "")


def device_of(model: PreTrainedModel) -> str:
    """The devices that hold the model, in words: "cpu", "cuda: NVIDIA H200", "cuda: 2 x NVIDIA H200"."""
    import torch

    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if not all(name.startswith("cuda") for name in devices):
        return ", ".join(devices)
    kinds = {torch.cuda.get_device_name(name) for name in devices}
    count = f"{len(devices)} x " if len(devices) > 1 else ""
    return f"cuda: {count}{', '.join(sorted(kinds))}"


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
