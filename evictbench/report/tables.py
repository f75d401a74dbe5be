"""The leaderboard: one row per run and task, and per run one for the mean over its tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from evictbench.stats.intervals import Interval, mean_of_means
from evictbench.stats.paired import Difference, difference
from evictbench.store.frame import METRIC, cells, document_scores
from evictbench.store.select import FULL, budget_bounds, budget_with_seen, comparable, text_of

if TYPE_CHECKING:
    import pandas as pd


MOST_METRICS = 2
"""Metrics of each suite that have a column beside the score's."""


MEANS = ("occupancy_mean", "cache_bytes", "prefill_peak_bytes", "truncated", "repetition")
"""Fields of a row that are the mean over samples."""


@dataclass(frozen=True)
class Row:
    """One run on one task, or on the mean of them (`task` is "mean of N"; `whole`: it stands for the whole run).

    Scores and shares are in [0, 1], sizes in bytes. group: the runs that it may be compared with. versus: the full
    cache on the same documents; None without one. transferred_from: the model that the policy's weights were trained
    on, where it is another than the run's. bound: whether the budget is one, and no target.
    """

    run: str
    suite: str
    model: str
    policy: str
    budget: str
    prefill: str
    question: str
    task: str
    whole: bool
    group: int
    score: float
    interval: Interval | None
    versus: Difference | None
    documents: int
    samples: int
    occupancy_max: int
    occupancy_mean: float
    cache_bytes: float
    prefill_peak_bytes: float
    truncated: float
    repetition: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    transferred_from: str | None = None
    bound: bool = True

    @property
    def budget_seen(self) -> str:
        """The budget, with the entries that queries saw where it is no bound."""
        return budget_with_seen(self.budget, self.bound, self.occupancy_mean, self.occupancy_max)


@dataclass(frozen=True)
class Board:
    """The rows in the order of suite, model and group, the best first, and the names of other metrics."""

    rows: Sequence[Row]
    metrics: Sequence[str]


def leaderboard(samples: pd.DataFrame) -> Board:
    """The leaderboard of these samples, with each run compared with the full cache of its group."""
    import pandas as pd

    # Two folders of one run, as shards that were copied together, are one.
    samples = samples.assign(group=comparable(samples), folder="")
    by_task = cells(samples)
    names = _metrics(samples)
    if names:
        columns = [f"{METRIC}{name}" for name in names]
        keys = [samples["fingerprint"].astype(str), samples["task"].astype(str)]
        documents = samples[columns].astype(float).groupby([*keys, samples["doc_id"]]).mean()
        means = documents.groupby(level=[0, 1]).mean()
        by_task = by_task.merge(means.reset_index(), on=["fingerprint", "task"])
    by_run = {str(mark): document_scores(run) for mark, run in samples.groupby("fingerprint", observed=True)}
    group_of = samples.drop_duplicates("fingerprint").set_index("fingerprint")["group"].to_dict()
    full: dict[int, dict[tuple[str, int], float]] = {}
    for mark in by_task.loc[by_task["policy_name"] == FULL, "fingerprint"].unique():
        full.setdefault(group_of[mark], {}).update(by_run[str(mark)])
    bounds = budget_bounds(by_task["policy"].astype(str).unique())
    rows: list[Row] = []
    for mark, run in by_task.groupby("fingerprint", sort=False):
        group = group_of[mark]
        base = None if run["policy_name"].iloc[0] == FULL else full.get(group)
        tasks = [_row(task, group, by_run[str(mark)], base, names, len(run) == 1) for _, task in run.iterrows()]
        if len(tasks) > 1:
            rows.append(_mean_row(tasks, by_run[str(mark)], base))
        rows += tasks
    rows = [replace(row, bound=bounds[row.policy]) for row in rows]
    place = {name: number for number, name in enumerate(dict.fromkeys(pd.unique(samples["suite"].astype(str))))}
    rows.sort(key=lambda row: (place[row.suite], row.model, row.group, not row.whole, row.task, -row.score))
    return Board(rows, names)


def _metrics(samples: pd.DataFrame) -> list[str]:
    """The first few metrics of each suite that differ from the score."""
    metrics: list[str] = []
    for _, suite in samples.groupby("suite", observed=True):
        names = [name for name in suite if str(name).startswith(METRIC) and suite[name].notna().any()]
        other = [name for name in names if not (suite[name] - suite["score"]).abs().max() < 1e-9]
        metrics += [str(name).removeprefix(METRIC) for name in other[:MOST_METRICS]]
    return list(dict.fromkeys(metrics))


def _row(
    task: pd.Series,
    group: int,
    documents: Mapping[tuple[str, int], float],
    base: Mapping[tuple[str, int], float] | None,
    metrics: Sequence[str],
    only: bool,
) -> Row:
    low, high = task["low"], task["high"]
    means: dict[str, Any] = {name: float(task[name]) for name in MEANS}
    values = {name: float(task[METRIC + name]) for name in metrics if task[METRIC + name] == task[METRIC + name]}
    return Row(
        run=str(task["fingerprint"]),
        suite=str(task["suite"]),
        model=str(task["model"]),
        policy=str(task["policy"]),
        budget=text_of(task["budget"]),
        prefill=text_of(task["prefill"]),
        question=text_of(task["question"]),
        task=str(task["task"]),
        whole=only,
        group=group,
        score=float(task["score"]),
        interval=None if low != low else (float(low), float(high)),
        versus=_versus(documents, base, str(task["task"])),
        documents=int(task["documents"]),
        samples=int(task["samples"]),
        occupancy_max=int(task["occupancy_max"]),
        metrics=values,
        transferred_from=task["transferred_from"] if isinstance(task.get("transferred_from"), str) else None,
        **means,
    )


def _versus(
    documents: Mapping[tuple[str, int], float], base: Mapping[tuple[str, int], float] | None, task: str | None = None
) -> Difference | None:
    """The difference from the full cache's scores, with its interval inside [-1, 1]; task: None for all tasks."""
    versus = None if base is None else difference(documents, base, task)
    if versus is None or versus.low is None or versus.high is None:
        return versus
    return replace(versus, low=max(-1.0, versus.low), high=min(1.0, versus.high))


def _mean_row(
    tasks: Sequence[Row],
    documents: Mapping[tuple[str, int], float],
    base: Mapping[tuple[str, int], float] | None,
) -> Row:
    first = tasks[0]
    score, interval = mean_of_means([(task.score, task.interval) for task in tasks])
    if interval is not None:
        interval = max(0.0, interval[0]), min(1.0, interval[1])
    shared = [name for name in first.metrics if all(name in task.metrics for task in tasks)]
    means: dict[str, Any] = {name: fmean(getattr(task, name) for task in tasks) for name in MEANS}
    return Row(
        run=first.run,
        suite=first.suite,
        model=first.model,
        policy=first.policy,
        budget=first.budget,
        prefill=first.prefill,
        question=first.question,
        task=f"mean of {len(tasks)}",
        whole=True,
        group=first.group,
        score=score,
        interval=interval,
        versus=_versus(documents, base),
        documents=sum(task.documents for task in tasks),
        samples=sum(task.samples for task in tasks),
        occupancy_max=max(task.occupancy_max for task in tasks),
        metrics={name: fmean(task.metrics[name] for task in tasks) for name in shared},
        transferred_from=first.transferred_from,
        **means,
    )
