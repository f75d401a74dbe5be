"""The reference results as a page and a picture: `python -m studies.reference_page [FOLDER]`.

From the published runs: the tables of FOLDER/README.md between its two marks, a short one of the README at the root
likewise, and FOLDER/budget_score.png. Only documents that every cell of a suite has are counted; differences are paired
by document, p is the sign-flip test's (`evictbench.stats.paired`), by Holm's method over the rows of a table.
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
"""What every row is set beside."""

MARKS = "<!-- tables: made by studies.reference_page -->", "<!-- end of tables -->"

METRICS: Mapping[str, tuple[str, float, str]] = {
    "ruler": ("score", 100.0, ".1f"),
    "fidelity": ("metric_kl", 1.0, ".4f"),
}
"""By suite: the column that its table shows, times what, and how it is written."""

Cells = Mapping[tuple[str, str], "Documents"]
"""(policy, budget): the values of its documents. The full cache's budget is ""."""


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code."""
    folder = Path((arguments or sys.argv[1:] or [str(FOLDER)])[0])
    try:
        between(folder / "README.md", "\n".join(lines(folder)))
        if folder == FOLDER:
            between(Path("README.md"), "\n".join(summary(folder)) + "\n")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if any((folder / "ruler").glob("*/*/samples.jsonl")):
        draw(folder)
    return 0


def between(page: Path, text: str) -> None:
    """Write a text between the two marks of a page; ValueError where it lacks them."""
    before, mark, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    if not mark or MARKS[1] not in rest:
        raise ValueError(f"{page} lacks the marks that its tables stand between.")
    page.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8")


def summary(folder: Path) -> Iterator[str]:
    """One row a policy, the best at the larger budget first: its means in every suite and at every budget."""
    from evictbench.stats.intervals import mean_of_tasks
    from evictbench.store.frame import read_results

    samples = read_results(folder, text=False)
    columns: dict[str, dict[str, tuple[float, str]]] = {}
    for suite, (column, times, form) in METRICS.items():
        cells = common(read_cells(samples[samples["suite"] == suite], column))
        for budget in BUDGETS:
            words: dict[str, tuple[float, str]] = {}
            for (policy, at), values in cells.items():
                if at in ("", budget):
                    tasks = sorted({task for task, _ in values})
                    mean, _ = mean_of_tasks(
                        {task: [v for (of, _), v in values.items() if of == task] for task in tasks}
                    )
                    words[policy] = mean, format(mean * times, form)
            columns[f"{suite} {column.removeprefix('metric_')}, {budget}"] = words
    first = columns[f"ruler score, {BUDGETS[-1]}"]
    last = columns[f"fidelity kl, {BUDGETS[-1]}"]
    yield "| policy | " + " | ".join(columns) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    for policy in sorted(first, key=lambda name: (-first[name][0], last[name][0])):
        yield f"| `{policy}` | " + " | ".join(words[policy][1] for words in columns.values()) + " |"


def lines(folder: Path) -> Iterator[str]:
    """The tables, in Markdown."""
    from evictbench.store.frame import read_results

    samples = read_results(folder, text=False)
    for suite, (column, times, form) in METRICS.items():
        of_suite = samples[samples["suite"] == suite]
        cells, seen = (common(read_cells(of_suite, name)) for name in (column, "occupancy_mean"))
        if not cells:
            continue
        tasks = sorted({task for task, _ in next(iter(cells.values()))})
        count = len(next(iter(cells.values()))) // len(tasks)
        for budget in BUDGETS:
            yield f"**{suite}, {budget} entries**: {column.removeprefix('metric_')} on {count} documents a task."
            yield ""
            yield from table(cells, seen, budget, tasks, times, form)
            yield ""


def read_cells(samples: pd.DataFrame, column: str) -> Cells:
    """The values of each cell's documents."""
    found: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    names = zip(samples["policy"], samples["budget"], samples["task"], samples["doc_id"], samples[column], strict=True)
    for policy, budget, task, document, value in names:
        cell = str(policy), "" if budget is None or budget != budget else str(budget)
        found.setdefault(cell, {})[str(task), int(document)] = float(value)
    return found


def common(cells: Cells) -> Cells:
    """The same, of documents alone that every cell has."""
    shared = set.intersection(*(set(values) for values in cells.values())) if cells else set()
    return {cell: {key: values[key] for key in sorted(shared)} for cell, values in cells.items() if shared}


def by_task(values: Documents) -> dict[str, list[float]]:
    """The values of each task."""
    found: dict[str, list[float]] = {}
    for (task, _), value in sorted(values.items()):
        found.setdefault(task, []).append(value)
    return found


def table(cells: Cells, seen: Cells, budget: str, tasks: list[str], times: float, form: str) -> Iterator[str]:
    """A row a policy: the entries that a decode query saw, its mean, each task's where there are several, and how far
    it is from BASE."""
    from evictbench.stats.intervals import holm, mean_of_tasks, spread_interval
    from evictbench.stats.paired import difference

    rows = {policy: values for (policy, at), values in cells.items() if at in ("", budget)}
    entries = {policy: fmean(values.values()) for (policy, at), values in seen.items() if at in ("", budget)}
    beside = {
        policy: found
        for policy, values in rows.items()
        if policy != BASE and (found := difference(values, rows[BASE])) is not None
    }
    corrected = dict(zip(beside, holm([found.p_value() for found in beside.values()]), strict=True))
    names = tasks if len(tasks) > 1 else []
    heads = ["policy", "seen", "mean, 95%", *names, f"minus {BASE}, 95%", "p (Holm)"]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for policy, values in rows.items():
        of_tasks = by_task(values)
        if times == 1.0:
            mean, interval = fmean(values.values()), spread_interval([*values.values()])
        else:
            mean, interval = mean_of_tasks(of_tasks)
        words = [f"`{policy}`", f"{entries[policy]:.0f}", _said(mean, interval, times, form)]
        words += [format(fmean(of_tasks[task]) * times, form) for task in names]
        if (found := beside.get(policy)) is not None:
            span = None if found.low is None or found.high is None else (found.low, found.high)
            words += [_said(found.value, span, times, "+" + form), f"{corrected[policy]:.2g}"]
        else:
            words += ["", ""]
        yield "| " + " | ".join(words) + " |"


def _said(value: float, interval: tuple[float, float] | None, times: float, form: str) -> str:
    if interval is None:
        return format(value * times, form)
    low, high = (format(end * times, form) for end in interval)
    return f"{value * times:{form}} ({low} to {high})"


def draw(folder: Path) -> None:
    """Budget against score, of RULER."""
    from evictbench.plot.figures_of import drawings
    from evictbench.plot.request import Request
    from evictbench.store.select import Filters

    request = Request(folder, filters=Filters(suite="ruler"), paired=True)
    for drawing in drawings(request, ["budget"], lambda sentence: print(f"warning: {sentence}", file=sys.stderr)):
        drawing.figure().savefig(folder / "budget_score.png")


if __name__ == "__main__":
    raise SystemExit(main())
