"""A figure's numbers with several trainings of a policy as one row: mean, standard deviation, and their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evictbench.plot.data import Panels, ordered
from evictbench.plot.style import PERCENT
from evictbench.stats.trainings import over_trainings
from evictbench.store.trainings import TRAINING

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("panel", "policy", "budget", "metric", "layer", "window")
"""Columns of a figure's numbers that say what a row is about."""

COUNTS = ("tasks", "documents")
"""Columns that are counts; of several trainings, the least."""


def with_trainings(make: Callable[[Panels], pd.DataFrame], panels: Panels, metric: str = "score") -> pd.DataFrame:
    """The numbers that `make` finds in each training alone, with one row for all trainings of a policy and budget.

    panels: samples of `evictbench.store.trainings.as_one_row`. make: of a figure. metric: of its `value`, where its
    rows name none.

    Rows of several trainings hold means; `sd` is the standard deviation (n - 1) of `value`, `wrong_sd` of
    `wrong` and so on; low and high are the 95% interval whose units are the trainings. `trainings` says how many, and
    is null for policies that are not trained. Rows of one training stay as they are, with documents as the units.
    """
    import pandas as pd

    number = {name: _numbers(samples) for name, samples in panels.items()}
    frames = []
    for turn in range(max(int(places.max()) for places in number.values()) + 1):
        parts = {name: samples[number[name].isin((turn, -1))] for name, samples in panels.items()}
        trained = {name: set(samples["policy"][number[name] == turn].astype(str)) for name, samples in panels.items()}
        parts = {name: part for name, part in parts.items() if trained[name] or turn <= 0}
        if parts:
            found = make(parts)
            own = found["policy"].isin(set().union(*(trained[name] for name in parts)))
            frames.append(found[own].assign(trainings=1))
            if turn == 0:
                frames.append(found[~own].assign(trainings=float("nan")))
    whole = pd.concat(frames, ignore_index=True)
    order = list(dict.fromkeys(name for name in KEYS if name in whole))
    rows = [_row(group, metric) for _, group in whole.groupby(order, dropna=False, sort=False)]
    return ordered(pd.DataFrame(rows)[_columns(whole, rows)])


def _numbers(samples: pd.DataFrame) -> pd.Series:
    """The number of each sample's training among those of its policy, from 0; -1 where there is none."""
    import pandas as pd

    rows = samples[["policy", TRAINING]].astype(str).drop_duplicates()
    trained = rows[rows[TRAINING] != ""].sort_values(["policy", TRAINING])
    places = {
        (row.policy, row.training): place
        for _, of_policy in trained.groupby("policy")
        for place, row in enumerate(of_policy.itertuples())
    }
    keys = list(zip(samples["policy"].astype(str), samples[TRAINING].astype(str), strict=True))
    return pd.Series([places.get(key, -1) for key in keys], index=samples.index)


def _row(group: pd.DataFrame, metric: str) -> dict[str, Any]:
    """One row from those of a policy's trainings."""
    first: dict[str, Any] = group.iloc[0].to_dict()
    if len(group) == 1:
        return first
    row = dict(first)
    for name in group:
        values = group[name]
        if name in KEYS or values.dtype.kind not in "fiu" or values.isna().any():
            continue
        row[name] = values.min() if name in COUNTS else float(values.mean())
    for name, low, high, deviation in _with_interval(group):
        if group[name].isna().any():
            continue
        found = over_trainings(group[name].astype(float).tolist())
        assert found.interval is not None
        least, most = found.interval
        if (first.get("metric", metric) if name == "value" else name) in PERCENT:
            least, most = max(0.0, least), min(1.0, most)
        row |= {name: found.mean, low: least, high: most, deviation: found.deviation}
    if "score" in group:  # how answers ended has no intervals
        row["score_sd"] = over_trainings(group["score"].astype(float).tolist()).deviation
    return row | {"trainings": len(group)}


def _with_interval(frame: pd.DataFrame) -> list[tuple[str, str, str, str]]:
    """The columns that have an interval, those of its ends, and the one of the standard deviation."""
    named = [name for name in frame if f"{name}_low" in frame]
    found = [(name, f"{name}_low", f"{name}_high", f"{name}_sd") for name in named]
    return ([("value", "low", "high", "sd")] if "low" in frame else []) + found


def _columns(whole: pd.DataFrame, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns in order: each standard deviation before its interval, the number of trainings at the end."""
    columns = [str(name) for name in whole if name != "trainings"]
    for _, low, _, deviation in _with_interval(whole):
        if any(deviation in row for row in rows):
            columns.insert(columns.index(low), deviation)
    if any("score_sd" in row for row in rows):
        columns.insert(columns.index("score") + 1, "score_sd")
    return [*columns, "trainings"]
