"""What a reader of a leaderboard should know before believing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evictbench.policy.budget import Budget
from evictbench.store.doubts import doubts
from evictbench.store.select import FULL, budget_bounds, text_of

if TYPE_CHECKING:
    import pandas as pd

    from evictbench.report.tables import Board, Row

LEVEL = 0.05
"""p below which a difference is called significant."""

MOST_TRUNCATED = 0.05
"""The share of answers that may be cut off."""


@dataclass(frozen=True)
class Notice:
    """A sentence under one of a few headings. run: the fingerprint of the run that it is about, where it is one."""

    kind: str
    text: str
    run: str | None = None


def warnings(samples: pd.DataFrame, board: Board) -> Iterator[Notice]:
    """A doubtful full cache, arms above it, occupancy past the budget, answers cut off, tables of different tasks."""
    yield from _doubtful_full(samples)
    yield from _above_full(board)
    yield from _past_budget(samples)
    for row in board.rows:
        if row.truncated > MOST_TRUNCATED and not row.task.startswith("mean of"):
            text = (
                f"{_named(row)}, {row.task}: {100 * row.truncated:.0f}% of the answers are cut off by the token limit "
                "or end inside a thought."
            )
            yield Notice("answers cut off", text, row.run)
    yield from _different_tasks(samples)


def _doubtful_full(samples: pd.DataFrame) -> Iterator[Notice]:
    columns = ["task", "score", "output_tokens", "token_limit", "truncated"]
    full = samples[samples["policy_name"].astype(str) == FULL]
    for mark, run in full.groupby("fingerprint", observed=True):
        where = f"{run['suite'].iloc[0]}, {run['model'].iloc[0]}"
        for sentence in doubts(run[columns].to_dict("records")):
            yield Notice("full cache in doubt", f"{where}: {sentence}", str(mark))


def _above_full(board: Board) -> Iterator[Notice]:
    compared = [row for row in board.rows if row.whole and row.versus is not None]
    for row in compared:
        assert row.versus is not None
        if row.versus.value > 0 and (p := row.versus.p_value()) < LEVEL:
            text = (
                f"{_named(row)} scores {100 * row.versus.value:.1f} points above the full cache on the same "
                f"{row.versus.documents} documents (p = {p:.2g}, sign-flip test; {len(compared)} arms were compared). "
                "Eviction seldom helps: look at how the full cache's answers fail first."
            )
            yield Notice("above the full cache", text, row.run)


def _past_budget(samples: pd.DataFrame) -> Iterator[Notice]:
    bounds = budget_bounds(samples["policy"].astype(str).unique())
    budgeted = samples[samples["budget"].notna()]
    for mark, run in budgeted.groupby("fingerprint", observed=True):
        first = run.iloc[0]
        budget = Budget.parse(str(first["budget"]))
        texts = zip(run["prompt_tokens"], run["output_tokens"], strict=True)
        allowed = [budget.at(int(prompt), int(prompt) + int(answer)) for prompt, answer in texts]
        policy = str(first["policy"])
        # A policy without a guard stands at its mean, which is what its budget is about.
        column = "occupancy_max" if bounds[policy] else "occupancy_mean"
        over = [seen - most for seen, most in zip(run[column], allowed, strict=True) if seen > most]
        if over:
            which = "at most" if bounds[policy] else "on average"
            text = (
                f"{policy} {first['budget']} on {first['suite']}, {first['model']}: in {len(over)} of {len(run)} "
                f"samples a query saw {which} {max(over):.4g} entries more than the budget allows"
                + ("." if bounds[policy] else "; its budget is a target and not a bound.")
            )
            yield Notice("past the budget", text, str(mark))


def _different_tasks(samples: pd.DataFrame) -> Iterator[Notice]:
    for (suite, model), group in samples.groupby(["suite", "model"], observed=True):
        have = group.drop_duplicates(["fingerprint", "task"]).groupby("fingerprint", observed=True)["task"]
        sets = Counter(tuple(sorted(map(str, tasks))) for _, tasks in have)
        if len(sets) > 1:
            text = f"{suite} on {model}: not every run has the same tasks, so means over tasks do not compare."
            yield Notice("different tasks", text)
        sizes = group.groupby(["fingerprint", "task"], observed=True)["doc_id"].nunique()
        uneven = [str(task) for task, of_task in sizes.groupby(level=1, observed=True) if of_task.nunique() > 1]
        if uneven:
            text = (
                f"{suite} on {model}: not every run has answered as many documents of {', '.join(uneven)}. "
                "Differences from the full cache are over the documents that both have; scores are not."
            )
            yield Notice("different documents", text)


def _named(row: Row) -> str:
    budget = "" if row.budget == text_of(None) else f" {row.budget}"
    return f"{row.policy}{budget} on {row.suite}, {row.model}"
