"""The log of a training as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAME = "curves.png"

_NOT_SHOWN = ("step", "tokens", "seconds", "budget")
_SMOOTHED_OVER = 50
"""Steps up to which a curve is drawn as it is; a longer one gets its running mean on top."""


def plot(lines: Sequence[dict[str, Any]], file: Path, title: str) -> None:
    """One panel for each number that the log's lines carry, over the steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    names = [name for name in dict.fromkeys(name for line in lines for name in line) if name not in _NOT_SHOWN]
    if not names:
        return
    columns = min(3, len(names))
    height = -(-len(names) // columns)
    figure, axes = plt.subplots(height, columns, figsize=(4 * columns, 2.6 * height), squeeze=False)
    for name, axis in zip(names, axes.flat, strict=False):
        points = [(line["step"], line[name]) for line in lines if name in line]
        steps, numbers = np.array([step for step, _ in points]), np.array([number for _, number in points])
        window = len(numbers) // _SMOOTHED_OVER
        axis.plot(steps, numbers, linewidth=0.8, alpha=0.35 if window > 1 else 1.0, color="tab:blue")
        if window > 1:
            mean = np.convolve(numbers, np.ones(window) / window, mode="valid")
            axis.plot(steps[window - 1 :], mean, linewidth=1.5, color="tab:blue")
        axis.set_title(name.replace("_", " "), fontsize=10)
        axis.tick_params(labelsize=8)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("step", fontsize=9)
    figure.tight_layout()
    unfinished = file.with_name(f".{file.name}-unfinished.png")
    figure.savefig(unfinished, dpi=120)
    plt.close(figure)
    unfinished.replace(file)
