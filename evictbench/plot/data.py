"""The numbers of each figure of runs, as tidy frames: what is drawn is what is printed.

Every frame has the columns `panel` ("" where there is one panel), `policy` (its label) and `budget` (as given; null
for a policy without one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from evictbench.plot.style import in_order
from evictbench.stats.intervals import Interval, mean_of_means
from evictbench.store.frame import cells
from evictbench.store.select import budget_bounds

if TYPE_CHECKING:
    import pandas as pd

Panels = Mapping[str, "pd.DataFrame"]
"""Name of a panel to its samples."""


def budget_points(panels: Panels, metric: str = "score") -> pd.DataFrame:
    """One row per panel, policy and budget.

    value: the mean of `metric` over tasks, each task's over its documents; low, high: its 95% interval. entries: the
    budget's place on the axis, which is the given number, or the measured mean for a share of the text and for a policy
    whose budget is no bound; null without a budget. seen: entries per KV head that a decode query saw, mean.
    cache_bytes: mean. tasks, documents: how many.
    """
    import pandas as pd

    rows = [row for name, samples in panels.items() for row in _points(name, samples, metric)]
    return ordered(pd.DataFrame(rows))


def fidelity_points(panels: Panels) -> pd.DataFrame:
    """`budget_points` of KL and of the perplexity ratio, with a panel for each and the column `metric`."""
    import pandas as pd

    frames = []
    for name, samples in panels.items():
        for metric, title in (("kl", "KL"), ("ppl_ratio", "perplexity ratio")):
            panel = ", ".join(filter(None, (name, title)))
            frames.append(budget_points({panel: samples}, metric).assign(metric=metric))
    return pd.concat(frames, ignore_index=True)


def error_modes(panels: Panels) -> pd.DataFrame:
    """One row per panel, policy and budget: the lost score, in [0, 1], by how the answers ended.

    repetition: in a loop; over_long: cut off by the token limit or inside a thought, and in no loop; wrong: neither. Of
    right-or-wrong scores these are shares of answers. Together with `score` they add up to 1. Tasks weigh alike.
    """
    import pandas as pd

    rows = []
    for panel, samples in panels.items():
        lost = 1 - samples["score"].astype(float)
        loops, cut = samples["repetition"].astype(bool), samples["truncated"].astype(bool)
        modes = pd.DataFrame(
            {
                "repetition": lost.where(loops, 0.0),
                "over_long": lost.where(cut & ~loops, 0.0),
                "wrong": lost.where(~cut & ~loops, 0.0),
                "score": samples["score"].astype(float),
            }
        )
        by_document = modes.groupby(_keys(samples, "policy", "budget", "task", "doc_id")).mean()
        by_task = by_document.groupby(level=[0, 1, 2]).mean()
        by_cell = by_task.groupby(level=[0, 1]).mean()
        documents = by_document.groupby(level=[0, 1]).size()
        for (policy, budget), row in by_cell.iterrows():
            rows.append(
                {
                    "panel": panel,
                    "policy": policy,
                    "budget": budget or None,
                    **row.to_dict(),
                    "documents": int(documents[policy, budget]),
                }
            )
    return ordered(pd.DataFrame(rows))


def ordered(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows by panel, then by policy as in legends, then by budget, with shares of the text after numbers."""
    panels, policies = list(dict.fromkeys(frame["panel"])), in_order(frame["policy"])

    def rank(row: Any) -> tuple[int, int, bool, float]:
        budget = row.budget if isinstance(row.budget, str) else "0"
        return panels.index(row.panel), policies.index(row.policy), budget.endswith("%"), float(budget.rstrip("%"))

    ranks = [rank(row) for row in frame.itertuples()]
    return frame.iloc[sorted(range(len(frame)), key=lambda i: ranks[i])].reset_index(drop=True)


def _points(panel: str, samples: pd.DataFrame, metric: str) -> list[dict[str, object]]:
    by_task = cells(_merged(samples), metric)
    bounds = budget_bounds(by_task["policy"].astype(str).unique())
    rows = []
    for (policy, budget), tasks in by_task.groupby(_keys(by_task, "policy", "budget"), sort=False):
        intervals = [_interval(low, high) for low, high in zip(tasks["low"], tasks["high"], strict=True)]
        value, interval = mean_of_means(list(zip(tasks[metric].tolist(), intervals, strict=True)))
        if interval is not None and metric == "score":
            interval = max(0.0, interval[0]), min(1.0, interval[1])
        low, high = interval or (None, None)
        seen = fmean(tasks["occupancy_mean"])
        rows.append(
            {
                "panel": panel,
                "policy": policy,
                "budget": budget or None,
                "entries": _entries(budget, seen, max(tasks["occupancy_max"]), bounds[policy]),
                "value": value,
                "low": low,
                "high": high,
                "seen": seen,
                "cache_bytes": fmean(tasks["cache_bytes"]),
                "tasks": len(tasks),
                "documents": int(tasks["documents"].sum()),
            }
        )
    return rows


def _merged(samples: pd.DataFrame) -> pd.DataFrame:
    """Samples in which the runs of one policy and budget, which differ only in their tasks, are one run."""
    samples = samples.drop_duplicates(["policy", "budget", "task", "doc_id", "repeat"])
    key = samples["policy"].astype(str) + " " + samples["budget"].astype(object).fillna("").astype(str)
    return samples.assign(fingerprint=key, folder="")


def _entries(budget: str, seen: float, most: float, guard: bool) -> float | None:
    if not budget:
        return None
    return float(budget) if guard and budget.isascii() and budget.isdigit() and most <= int(budget) else seen


def _interval(low: float | None, high: float | None) -> Interval | None:
    return None if low is None or high is None or low != low or high != high else (low, high)


def _keys(frame: pd.DataFrame, *names: str) -> Sequence[pd.Series]:
    """Columns to group by, as strings; without a budget the string is empty."""
    return [
        frame[name] if name == "doc_id" else frame[name].astype(object).fillna("").astype(str).rename(name)
        for name in names
    ]
