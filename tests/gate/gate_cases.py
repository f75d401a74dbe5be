"""Runs and traces with known true differences, on disk and as pairs, and the gate called as from the command line."""

import numpy as np
import pandas as pd
from plot.plot_records import right, sample, steps, write_run, write_trace

from evictbench.gate.cells import Cell, Pair

__all__ = ["fidelity_lines", "pair", "right", "right_wrong", "sample", "scaled", "steps", "write_run", "write_trace"]


def right_wrong(draw, documents, drop, discordant=0.15, share=0.6):
    """Right-or-wrong scores here and there: the true difference is -drop, and at least `discordant` of them differ."""
    discordant = max(discordant, abs(drop))
    down, up = (discordant + drop) / 2, (discordant - drop) / 2
    luck = draw.random(documents)
    change = np.where(luck < down, -1, np.where(luck < down + up, 1, 0))
    there = np.where(change == -1, 1, np.where(change == 1, 0, draw.random(documents) < share))
    return there + change, there


def scaled(draw, documents, drop, spread=0.15):
    """Scores on a scale, likewise."""
    there = draw.normal(0.6, 0.15, documents)
    return there - drop + draw.normal(0, spread, documents), there


def pair(here, there, name="h2o @ 64", occupancy=None):
    """Two runs' scores as the gate compares them. occupancy: of each document, here and there."""
    held = occupancy or (np.full(len(here), 64.0),) * 2
    columns = {"task": "niah", "doc_id": np.arange(len(here)), "repeat": 0}
    for side, scores, entries in (("here", here, held[0]), ("there", there, held[1])):
        columns |= {
            f"score_{side}": np.asarray(scores, float),
            f"occupancy_mean_{side}": np.asarray(entries, float),
            f"cache_bytes_{side}": np.asarray(entries, float) * 1000,
            f"prompt_tokens_{side}": 500,
            f"output_tokens_{side}": 3,
        }
    frame = pd.DataFrame(columns)
    cell = Cell(name, "ruler", {"budget": "64"}, frame)
    return Pair(cell, cell, frame)


def fidelity_lines(documents=20, kl=0.01, **changes):
    """Samples of texts that are compared with the full cache, as the suite writes them."""
    found = []
    for number in range(documents):
        metrics = {"kl": kl, "agreement": 0.9, "ppl_ratio": 1.0, "nll": 2.0, "nll_full": 2.0}
        metrics |= {f"kl_q{quarter}": kl for quarter in range(1, 5)}
        line = sample(number, 0.9, task="text", metrics=metrics)
        found.append(line | {"by_position": {"kl": [kl, kl], "agreement": [0.9, 0.9]}} | changes)
    return found
