"""The figure of errors and answer lengths on the documents that the full cache gets right: its numbers.

DistillCache's table 8 (errors in % of those) and figure of answer lengths, KVpop's and IndexMem++'s lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.plot.data import Panels, budget_points
from evictbench.stats.intervals import Interval, mean_interval, mean_of_means
from evictbench.stats.ratios import Estimate, ratio_of_means
from evictbench.store.select import FULL, text_of, texts_of

if TYPE_CHECKING:
    import pandas as pd

RIGHT = 0.5
"""The score from which an answer counts as right."""

PARTS = {"wrong": "wrong", "length_ratio": "answer length", "cut_off": "cut off"}
"""The panels: the column that each shows, and its name."""

WAYS = ("repetition", "over_long", "incorrect")
"""How wrong answers ended, each in one way: in a loop; cut off by the limit or inside a thought, and in no loop; with
an answer that is wrong."""


def answer_points(panels: Panels) -> pd.DataFrame:
    """One row per panel, policy and budget, over the documents that the full cache gets right: those where at least
    half of its answers have a score of .5 or more. The full cache has a row too, whose errors are those of its other
    answers.

    wrong: the share of answers below that score, with its 95% interval wrong_low, wrong_high; repetition, over_long,
    incorrect: the shares of `WAYS`, which add up to it. cut_off: the share that the limit stopped, right or wrong, with
    its interval. tokens: of an answer, mean; length_ratio: that over the full cache's on the same documents, with its
    interval. Repeats are averaged first; documents are the units of intervals, and tasks weigh alike. A task of which
    the full cache gets nothing right is left out. entries, seen, tasks, documents: as of `budget_points`, of those
    documents.
    """
    import pandas as pd

    rows = []
    for panel, samples in panels.items():
        right, lengths = _full_right(samples, panel)
        documents = pd.MultiIndex.from_arrays([samples["task"].astype(str), samples["doc_id"]])
        there = samples[documents.isin(right)]
        for point in budget_points({panel: there}).to_dict("records"):
            policy, budget = point["policy"], point["budget"]
            mine = there["policy"].astype(str).eq(policy) & texts_of(there["budget"]).eq(text_of(budget))
            kept = {name: point[name] for name in ("panel", "policy", "budget", "entries")}
            rows.append(
                kept | _row(there[mine], lengths) | {name: point[name] for name in ("seen", "tasks", "documents")}
            )
    return pd.DataFrame(rows)


def has_lost_answers(samples: pd.DataFrame) -> bool:
    """Whether the full cache gets documents right, and another policy has answered."""
    full = samples["policy_name"].astype(str) == FULL
    return not full.all() and bool(_right(samples[full])[0])


def answer_panels(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `answer_points` as they are drawn: a panel for each of `PARTS`, with `value`, `low`, `high` and the
    column `metric`."""
    import pandas as pd

    frames = []
    for metric, title in PARTS.items():
        names = frame["panel"].map(lambda panel, title=title: ", ".join(filter(None, (panel, title))))
        own = {"value": frame[metric], "low": frame[f"{metric}_low"], "high": frame[f"{metric}_high"]}
        frames.append(frame.assign(panel=names, metric=metric, **own))
    return pd.concat(frames, ignore_index=True)


def _full_right(samples: pd.DataFrame, panel: str) -> tuple[set[tuple[str, int]], pd.Series]:
    """The documents (task, doc_id) that the full cache gets right, and the mean length of its answers to each."""
    full = samples[samples["policy_name"].astype(str) == FULL]
    where = f" of {panel}" if panel else ""
    if full.empty:
        raise UserError(
            f"The runs{where} have none of the full cache beside them, so that nobody knows which documents it gets "
            "right: evictbench run --policy full on the same data."
        )
    right, lengths = _right(full)
    if not right:
        raise UserError(f"The full cache gets no document{where} right, so that there is nothing to lose.")
    return right, lengths


def _right(full: pd.DataFrame) -> tuple[set[tuple[str, int]], pd.Series]:
    """As `_full_right`, of the full cache's samples."""
    keys = [full["task"].astype(str), full["doc_id"]]
    share = (full["score"] >= RIGHT).astype(float).groupby(keys).mean()
    return set(share.index[share >= RIGHT]), full["output_tokens"].groupby(keys).mean()


def _row(samples: pd.DataFrame, lengths: pd.Series) -> dict[str, Any]:
    """The columns of `answer_points` but for the keys. lengths: of the full cache's answers, by document."""
    import pandas as pd

    samples = samples.drop_duplicates(["task", "doc_id", "repeat"])
    wrong = samples["score"].astype(float) < RIGHT
    loops, cut = samples["repetition"].astype(bool), samples["truncated"].astype(bool)
    answers = pd.DataFrame(
        {
            "wrong": wrong,
            "repetition": wrong & loops,
            "over_long": wrong & cut & ~loops,
            "incorrect": wrong & ~cut & ~loops,
            "cut_off": cut,
            "tokens": samples["output_tokens"],
        }
    ).astype(float)
    documents = answers.groupby([samples["task"].astype(str), samples["doc_id"]]).mean()
    documents["full_tokens"] = lengths.reindex(documents.index)
    tasks = [of_task for _, of_task in documents.groupby(level=0)]
    found: dict[str, Any] = {}
    for name in ("wrong", "cut_off"):
        found |= _columns(name, [(task[name].mean(), mean_interval(task[name].tolist())) for task in tasks], share=True)
        if name == "wrong":
            found |= {way: sum(task[way].mean() for task in tasks) / len(tasks) for way in WAYS}
    found |= {"tokens": sum(task["tokens"].mean() for task in tasks) / len(tasks)}
    ratios = [
        ratio_of_means(task["tokens"].tolist(), task["full_tokens"].tolist())
        for task in tasks
        if task["full_tokens"].sum() > 0
    ]
    return found | _columns("length_ratio", ratios)


def _columns(name: str, estimates: Sequence[Estimate], share: bool = False) -> dict[str, float | None]:
    """A value over tasks and its interval, as three columns; share: it is in [0, 1]."""
    if not estimates:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    value, interval = mean_of_means(list(estimates))
    bounds: Interval | tuple[None, None] = interval or (None, None)
    if share and interval is not None:
        bounds = max(0.0, interval[0]), min(1.0, interval[1])
    return {name: value, f"{name}_low": bounds[0], f"{name}_high": bounds[1]}
