"""Published numbers and folders of runs with a known true retention."""

import numpy as np
from plot.plot_records import sample, write_run

from evictbench.store.published_number import OPTIONAL, Published

PAPER = {
    "paper": "2601.00001",
    "title": "Keep: a made-up method",
    "source": "Table 1, row H2O",
    "model": "Org/Tiny",
    "policy": "h2o",
    "trained": "none",
    "budget": "64",
    "budget_meaning": "entries per head",
    "suite": "ruler",
    "task": "niah",
    "metric": "accuracy",
    "unit": "percent",
    "confidence": "primary",
}


def published(value=72.00, full=80.01, **changes):
    """A number of a table that prints two decimals; by default its retention is 0.9."""
    return Published(**{**OPTIONAL, **PAPER, "value": value, "full": full, **changes})


def answers(draw, count, full, kept, gained=0.2):
    """Right-or-wrong scores of the full cache and of an arm whose true retention is `kept`."""
    right = (kept * full - (1 - full) * gained) / full
    assert 0 <= right <= 1
    f = draw.random(count) < full
    return (draw.random(count) < np.where(f, right, gained)).astype(float), f.astype(float)


def write_pair(root, arm, full, policy="h2o", budget="64", task="niah", **what):
    """A run of these scores, and the full cache's beside it."""
    lines = {"arm": arm, "full": full}
    lines = {name: [sample(n, float(x), task=task) for n, x in enumerate(scores)] for name, scores in lines.items()}
    write_run(root, lines["arm"], policy=policy, budget=budget, tasks=(task,), **what)
    write_run(root, lines["full"], policy="full", budget=None, tasks=(task,), **what)
