"""The numbers of each figure of a trace, as tidy frames, and which figures a trace has data for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError, unknown
from evictbench.plot import trace_figures as figures
from evictbench.plot.request import OF_TRACES, Drawing, PlotRequest
from evictbench.registry import split_policies
from evictbench.store.select import Filters, text_of
from evictbench.store.trace_files import DECODE, OK, PREFILL, RETENTION_FILE, read_retention, read_trace

if TYPE_CHECKING:
    import pandas as pd


BINS = 48
"""Bins of positions in a figure, at most."""

PARTS = ("attention_ms", "signals_ms", "policy_ms", "rest_ms")
FILTERS = ("policy", "budget", "context", "rows")
"""Columns of a trace that --policy, --budget and --where take."""


def drawings(request: PlotRequest, names: Sequence[str] | None) -> Iterator[Drawing]:
    """The figures of a trace. names: of figures, None for all that it has data for."""
    _check_options(request)
    about, steps = read_trace(request.folder)
    retention = read_retention(request.folder)
    steps = _chosen(steps, request.filters)
    if steps.empty:
        raise UserError(f"The trace in {request.folder} has no step yet.")
    title = f"{about.get('model', request.folder.name)}, {about.get('device', 'trace')}"
    mark = re.sub(r"[^\w.+=-]", "_", request.folder.resolve().name)
    if names is None:
        names = [name for name in OF_TRACES if retention is not None or name in ("latency", "memory")]
    for name in names:
        if name == "latency":
            yield Drawing(f"latency-{mark}", title, latency_points(steps), lambda f: figures.latency(f, title))
        elif name == "memory":
            yield Drawing(f"memory-{mark}", title, memory_points(steps), lambda f: figures.memory(f, title))
        elif retention is None:
            raise UserError(
                f"{request.folder} has no {RETENTION_FILE}: trace again with retention, or leave out {name}."
            )
        else:
            kept = _chosen(retention, request.filters)
            if name == "retention":
                yield Drawing(f"retention-{mark}", title, retention_map(kept), lambda f: figures.retention(f, title))
            else:
                yield Drawing(f"kept-{mark}", title, kept_points(kept), lambda f: figures.kept(f, title))


def latency_points(steps: pd.DataFrame) -> pd.DataFrame:
    """The time of decode steps and of prefill.

    Decode: per policy, budget, number of rows and place, the median milliseconds of a step (`value`), their quartiles
    (`low`, `high`) and the medians of their parts, at the mean `position`. A place is a context if there are several,
    else a stretch of positions. Prefill: seconds to read one prompt, at its length. `lost` marks cells that ran out of
    memory, at their context.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for panel, series, group in _places(_ok(steps, DECODE)):
        low, value, high = group["ms"].quantile([0.25, 0.5, 0.75])
        parts = {name: group[name].median() for name in PARTS}
        rows.append(_row(panel, series, group["position"].mean(), value, low, high, len(group)) | parts)
    prefill = _ok(steps, PREFILL).fillna({"budget": ""})
    for (policy, budget, context), group in prefill.groupby(["policy", "budget", "context"], sort=False):
        prompts = max(1, (group["position"] == context).sum())
        rows.append(
            _row("prefill", (policy, budget), context, group["ms"].sum() / prompts / 1000, None, None, len(group))
        )
    rows += _lost(steps, "decode")
    return _framed(pd.DataFrame(rows))


def memory_points(steps: pd.DataFrame) -> pd.DataFrame:
    """The most bytes that the cache held and that were allocated in decode, a panel for each, per policy, budget,
    number of rows and place as in `latency_points`."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for quantity, column in (("cache held", "cache_bytes"), ("memory allocated", "allocated_bytes")):
        for panel, series, group in _places(_ok(steps, DECODE)):
            name = panel.replace("decode", quantity)
            rows.append(_row(name, series, group["position"].mean(), group[column].max(), None, None, len(group)))
        rows += _lost(steps, quantity)
    return _framed(pd.DataFrame(rows))


def retention_map(retention: pd.DataFrame) -> pd.DataFrame:
    """Two views. `over time`: at each snapshot (`seen`), which share of all layers and heads held a position, by
    stretches of positions (`position` is the first, `width` their number). `by layer and head`: the same at the last
    snapshot, each head by itself. Null beyond what has been seen."""
    import pandas as pd

    rows = []
    for (policy, budget), group in _cells(retention):
        last = int(group["seen"].max())
        width = max(1, -(-last // BINS))
        for seen, snapshot in group.groupby("seen"):
            shares = _shares(snapshot["positions"], width, last, int(seen))
            rows += [_view("over time", policy, budget, seen, None, None, width, i, s) for i, s in enumerate(shares)]
        for _, head in group[group["seen"] == last].iterrows():
            shares = _shares([head["positions"]], width, last, last)
            at = int(head["layer"]), int(head["head"])
            rows += [_view("by layer and head", policy, budget, last, *at, width, i, s) for i, s in enumerate(shares)]
    return pd.DataFrame(rows)


def kept_points(retention: pd.DataFrame) -> pd.DataFrame:
    """`where kept tokens lie`: at the last snapshot, the share of all kept entries by stretches of positions (they add
    up to 1). `inside a recency window`: at each snapshot, the share of what a head keeps that a window of the last
    tokens of the same size would hold too, mean over layers and heads; 1 is a policy that keeps the most recent
    alone."""
    import numpy as np
    import pandas as pd

    rows = []
    for (policy, budget), group in _cells(retention):
        last = int(group["seen"].max())
        width = max(1, -(-last // 20))
        kept = np.concatenate([np.asarray(held) for held in group.loc[group["seen"] == last, "positions"]])
        counts = np.bincount(kept // width, minlength=-(-last // width))
        for place, count in enumerate(counts):
            middle = min(last, place * width + width / 2)
            rows.append(
                _row("where kept tokens lie", (policy, budget), middle, count / max(1, len(kept)), None, None, 1)
            )
        for seen, snapshot in group.groupby("seen"):
            inside = [
                float((np.asarray(held) >= seen - len(held)).mean()) for held in snapshot["positions"] if len(held)
            ]
            if inside:
                panel = "inside a recency window"
                rows.append(_row(panel, (policy, budget), float(seen), float(np.mean(inside)), None, None, len(inside)))
    return _framed(pd.DataFrame(rows))


def _row(
    panel: str, series: Sequence[Any], position: float, value: float, low: float | None, high: float | None, count: int
) -> dict[str, Any]:
    policy, budget = series[:2]
    return {
        "panel": panel,
        "policy": policy,
        "budget": budget or None,
        "rows": series[2] if len(series) > 2 else None,
        "position": float(position),
        "value": float(value),
        "low": low,
        "high": high,
        "steps": count,
    }


def _view(
    view: str, policy: str, budget: str, seen: float, layer: int | None, head: int | None, width: int, i: int, s: float
) -> dict[str, Any]:
    at = {"seen": int(seen), "layer": layer, "head": head, "position": i * width, "width": width, "kept": s}
    return {"view": view, "policy": policy, "budget": budget or None, **at}


def _shares(held: Any, width: int, last: int, seen: int) -> list[float]:
    """The share of each stretch of positions that the heads held, mean over heads; NaN beyond `seen`."""
    import numpy as np

    stretches = -(-last // width)
    counts = np.zeros(stretches)
    for positions in held:
        counts += np.bincount(np.asarray(positions, dtype=int) // width, minlength=stretches)[:stretches]
    there = np.clip(seen - np.arange(stretches) * width, 0, width)
    with np.errstate(divide="ignore", invalid="ignore"):
        return [float(share) for share in np.where(there > 0, counts / (there * len(held)), np.nan)]


def _ok(steps: pd.DataFrame, phase: str) -> pd.DataFrame:
    return steps[(steps["phase"] == phase) & (steps["status"] == OK)]


def _places(steps: pd.DataFrame) -> Iterator[tuple[str, tuple[str, str, int], pd.DataFrame]]:
    """Panel, series, and the steps of one place: a context where there are several, or a stretch of positions."""
    several = steps["rows"].nunique() > 1
    for (policy, budget, rows), group in steps.fillna({"budget": ""}).groupby(["policy", "budget", "rows"], sort=False):
        panel = f"decode, {_rows(rows)}" if several else "decode"
        if group["context"].nunique() > 1:
            places = group["context"]
        else:
            first = group["position"].min()
            places = (group["position"] - first) * BINS // max(BINS, group["position"].max() - first + 1)
        for _, part in group.groupby(places):
            yield panel, (policy, budget, rows), part


def _lost(steps: pd.DataFrame, quantity: str) -> list[dict[str, Any]]:
    """Cells that ran out of memory."""
    several = steps["rows"].nunique() > 1
    out = steps[steps["status"] != OK].drop_duplicates("cell")
    return [
        _row(
            f"{quantity}, {_rows(row['rows'])}" if several else quantity,
            (row["policy"], row["budget"], row["rows"]),
            row["context"],
            float("nan"),
            None,
            None,
            0,
        )
        | {"lost": True}
        for _, row in out.fillna({"budget": ""}).iterrows()
    ]


def _framed(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a column `line`: the policy, and its budget if any policy has several."""
    frame["lost"] = frame["lost"].eq(True) if "lost" in frame else False
    budgets = frame.groupby("policy")["budget"].nunique().max() > 1
    names = frame["policy"].astype(str)
    if budgets:
        names = names + frame["budget"].map(lambda budget: f" {budget}" if isinstance(budget, str) else "")
    frame.insert(1, "line", names)
    return frame


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def _cells(retention: pd.DataFrame) -> Any:
    return retention.fillna({"budget": ""}).groupby(["policy", "budget"], sort=False)


def _chosen(frame: pd.DataFrame, filters: Filters) -> pd.DataFrame:
    """The rows of a trace that the filters leave."""
    chosen: dict[str, list[str]] = {}
    if filters.policy is not None:
        chosen["policy"] = split_policies(filters.policy)
    if filters.budget is not None:
        chosen["budget"] = [word.strip() for word in filters.budget.split(",")]
    for pair in filters.where:
        column, _, value = pair.partition("=")
        if column not in FILTERS:
            raise unknown("column", column, FILTERS, " of a trace")
        chosen.setdefault(column, []).append(value)
    for column, values in chosen.items():
        if column not in frame:
            continue
        texts = frame[column].map(text_of)
        for value in values:
            if value not in set(texts):
                raise unknown(column, value, set(texts), " in this trace")
        frame = frame[texts.isin(values)]
    return frame


def _check_options(request: PlotRequest) -> None:
    """Raise UserError for options about scores, which a trace does not have."""
    given = {"metric": request.metric != "score", "paired": request.paired}
    given |= {name: getattr(request, name) is not None for name in ("by", "allow")}
    given |= {name: getattr(request.filters, name) is not None for name in ("suite", "model", "task")}
    idle = [f"--{name}" for name, is_given in given.items() if is_given]
    if idle:
        raise UserError(f"{request.folder} is a trace, where {' and '.join(idle)} would do nothing: leave it out.")
