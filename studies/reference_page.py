"""The reference results as a page and a picture: `python -m studies.reference_page [FOLDER]`.

From the published runs it makes the tables of FOLDER/README.md between its two marks, a short one in the README at the
root likewise, and FOLDER/budget_score.png. Only documents that every cell of a suite has are counted; differences are
paired by document, p is the sign-flip test's (`evictbench.stats.paired`), by Holm's method over the rows of a table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from studies.reference import BUDGETS, FOLDER

if TYPE_CHECKING:
    import pandas as pd

    from evictbench.stats.paired import Documents

BASE = "h2o"
"""The policy that every row is compared with."""

MARKS = "<!-- tables: made by studies.reference_page -->", "<!-- end of tables -->"

METRICS: Mapping[str, tuple[str, float, str]] = {
    "ruler": ("score", 100.0, ".1f"),
    "fidelity": ("metric_kl", 1.0, ".4f"),
}
"""By suite: the column that its table shows, the factor that it is multiplied by, and its number format."""

Cells = Mapping[tuple[str, str], "Documents"]
"""By policy and budget: the values of the documents. The full cache's budget is ""."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    folder = Path((arguments or sys.argv[1:] or [str(FOLDER)])[0])
    try:
        write_between_marks(folder / "README.md", "\n".join(lines(folder)))
        if folder == FOLDER:
            write_between_marks(Path("README.md"), "\n".join(summary(folder)) + "\n")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if any((folder / "ruler").glob("*/*/samples.jsonl")):
        draw(folder)
    return 0


def write_between_marks(page: Path, text: str) -> None:
    """Write a text between the two marks of a page; raises ValueError where it lacks them."""
    before, mark, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    if not mark or MARKS[1] not in rest:
        raise ValueError(f"{page} lacks the marks that its tables stand between.")
    page.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8")


def summary(folder: Path) -> Iterator[str]:
    """The lines of a table of means by suite and budget: a row per policy, the best at the larger budget first.

    Where a budget is a target and no bound, the mean of the entries that queries saw stands beside the value.
    """
    from evictbench.stats.intervals import mean_of_tasks
    from evictbench.store.frame import read_results
    from evictbench.store.select import budget_bounds, reading_of

    samples = read_results(folder, text=False)
    bounds = budget_bounds(samples["policy"].astype(str).unique())
    columns: dict[str, dict[str, tuple[float, str]]] = {}
    for suite, (column, factor, form) in METRICS.items():
        of_suite = samples[samples["suite"] == suite]
        cells, seen = (common(read_cells(of_suite, name)) for name in (column, "occupancy_mean"))
        for budget in BUDGETS:
            means: dict[str, tuple[float, str]] = {}
            for (policy, own_budget), values in cells.items():
                if own_budget in ("", budget):
                    tasks = sorted({task for task, _ in values})
                    mean, _ = mean_of_tasks(
                        {task: [value for (name, _), value in values.items() if name == task] for task in tasks}
                    )
                    text = format(mean * factor, form)
                    if own_budget and not bounds[policy]:
                        text += f" (saw {fmean(seen[policy, own_budget].values()):.0f})"
                    means[policy] = mean, text
            columns[f"{suite} {column.removeprefix('metric_')}, {budget}"] = means
    first = columns[f"ruler score, {BUDGETS[-1]}"]
    last = columns[f"fidelity kl, {BUDGETS[-1]}"]
    for suite in METRICS:
        yield f"{suite}: {reading_of(samples[samples['suite'] == suite])}."
    yield ""
    yield "| policy | " + " | ".join(columns) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    for policy in sorted(first, key=lambda name: (-first[name][0], last[name][0])):
        yield f"| `{policy}` | " + " | ".join(means[policy][1] for means in columns.values()) + " |"


def lines(folder: Path) -> Iterator[str]:
    """The lines of all tables, in Markdown."""
    from evictbench.store.frame import read_results
    from evictbench.store.select import reading_of

    samples = read_results(folder, text=False)
    for suite, (column, factor, form) in METRICS.items():
        rows = samples[samples["suite"] == suite]
        names = (column, "occupancy_mean", "occupancy_max")
        cells, seen, most = (common(read_cells(rows, name)) for name in names)
        if not cells:
            continue
        tasks = sorted({task for task, _ in next(iter(cells.values()))})
        count = len(next(iter(cells.values()))) // len(tasks)
        for budget in BUDGETS:
            metric = column.removeprefix("metric_")
            yield f"**{suite}, {budget} entries**: {metric} on {count} documents a task; {reading_of(rows)}."
            yield ""
            yield from table(cells, seen, budget, tasks, factor, form, most)
            yield ""


def read_cells(samples: pd.DataFrame, column: str) -> Cells:
    """A column's values by cell and document. samples: a frame of `read_results`."""
    cells: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    names = zip(samples["policy"], samples["budget"], samples["task"], samples["doc_id"], samples[column], strict=True)
    for policy, budget, task, document, value in names:
        cell = str(policy), "" if budget is None or budget != budget else str(budget)
        cells.setdefault(cell, {})[str(task), int(document)] = float(value)
    return cells


def common(cells: Cells) -> Cells:
    """The cells with only the documents that all of them have."""
    shared = set.intersection(*(set(values) for values in cells.values())) if cells else set()
    return {cell: {key: values[key] for key in sorted(shared)} for cell, values in cells.items() if shared}


def by_task(values: Documents) -> dict[str, list[float]]:
    """The values by task, ordered by document."""
    tasks: dict[str, list[float]] = {}
    for (task, _), value in sorted(values.items()):
        tasks.setdefault(task, []).append(value)
    return tasks


def table(
    cells: Cells, seen: Cells, budget: str, tasks: list[str], factor: float, form: str, most: Cells | None = None
) -> Iterator[str]:
    """The lines of one table, a row per policy: entries that a decode query saw, the mean, each task's mean where there
    are several, and the difference from BASE.

    cells: the values. seen: the entries. factor, form: see `METRICS`. most: the most entries that a head held, which
    stand in the table where the budget is a target and no bound.
    """
    from evictbench.stats.intervals import holm, mean_of_tasks, spread_interval
    from evictbench.stats.paired import difference
    from evictbench.store.select import budget_bounds

    rows = {policy: values for (policy, own), values in cells.items() if own in ("", budget)}
    entries = {policy: f"{fmean(values.values()):.0f}" for (policy, own), values in seen.items() if own in ("", budget)}
    for policy in {policy for policy, bound in budget_bounds(entries).items() if not bound}:
        if most is not None:
            entries[policy] += f", a head at most {max(most[policy, budget].values()):.0f}"
    differences = {
        policy: pair
        for policy, values in rows.items()
        if policy != BASE and (pair := difference(values, rows[BASE])) is not None
    }
    corrected = dict(zip(differences, holm([pair.p_value() for pair in differences.values()]), strict=True))
    names = tasks if len(tasks) > 1 else []
    heads = ["policy", "seen", "mean, 95%", *names, f"minus {BASE}, 95%", "p (Holm)"]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for policy, values in rows.items():
        task_values = by_task(values)
        if factor == 1.0:
            mean, interval = fmean(values.values()), spread_interval([*values.values()])
        else:
            mean, interval = mean_of_tasks(task_values)
        texts = [f"`{policy}`", entries[policy], _with_interval(mean, interval, factor, form)]
        texts += [format(fmean(task_values[task]) * factor, form) for task in names]
        if (pair := differences.get(policy)) is not None:
            span = None if pair.low is None or pair.high is None else (pair.low, pair.high)
            texts += [_with_interval(pair.value, span, factor, "+" + form), f"{corrected[policy]:.2g}"]
        else:
            texts += ["", ""]
        yield "| " + " | ".join(texts) + " |"


def _with_interval(value: float, interval: tuple[float, float] | None, factor: float, form: str) -> str:
    if interval is None:
        return format(value * factor, form)
    low, high = (format(end * factor, form) for end in interval)
    return f"{value * factor:{form}} ({low} to {high})"


def draw(folder: Path) -> None:
    """Write budget_score.png: RULER's score over the budget."""
    from evictbench.plot.drawings import drawings
    from evictbench.plot.request import PlotRequest
    from evictbench.store.select import Filters

    request = PlotRequest(folder, filters=Filters(suite="ruler"), paired=True)
    for drawing in drawings(request, ["budget"], lambda sentence: print(f"warning: {sentence}", file=sys.stderr)):
        drawing.figure().savefig(folder / "budget_score.png")


if __name__ == "__main__":
    raise SystemExit(main())
