"""Which label is worth guessing? Both oracles on RULER tasks and on GSM8K text, at three budgets.

    python -m studies.oracle_study --data-dir DATA                    # results/reference/oracle_study
    python -m studies.oracle_study --data-dir DATA --samples 2 --texts 2 --folder try --out try/runs

Writes data.csv (a line per policy, budget, task and metric), plot.svg and plot.png, and README.md, which says what was
run. Finished samples are not run again.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from evictbench.evaluation.settings import RunSettings
from evictbench.models import bundled
from evictbench.registry import split_policies
from studies.command import exit_code, say
from studies.oracle_report import Line, draw, report

if TYPE_CHECKING:
    from studies.cells import Cell

POLICIES = "full,oracle:label=mean,oracle:label=max"
TASKS = "niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multivalue,vt,fwe"
METRICS = {"ruler": ("score",), "fidelity": ("kl", "agreement", "nll")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return exit_code(_study, _options(arguments))


def _study(options: argparse.Namespace) -> int:
    from studies.cells import plan_cells, run_cells

    budgets = [budget.strip() for budget in options.budgets.split(",")]
    lines: list[Line] = []
    runs: list[RunSettings] = []
    for common in _workloads(options):
        cells = plan_cells(split_policies(options.policies), budgets, common, say)
        if not run_cells(cells, options.block, say):
            say("stopped; what is finished is kept")
            return 130
        runs.append(cells[0].plan.settings)
        lines += summarise(cells)
    options.folder.mkdir(parents=True, exist_ok=True)
    write(lines, options.folder / "data.csv")
    draw(lines, options.folder)
    (options.folder / "README.md").write_text(report(lines, runs, options.model), encoding="utf-8")
    say(f"written to {options.folder}")
    return 0


def _workloads(options: argparse.Namespace) -> list[RunSettings]:
    shared: dict[str, Any] = {
        "policy": "full",
        "model": options.model,
        "seed": options.seed,
        "batch_size": options.block,
        "device": options.device,
        "data_dir": options.data_dir,
        "out": options.out,
    }
    return [
        RunSettings(suite="ruler", tasks=options.tasks, context=options.context, limit=options.samples, **shared),
        RunSettings(
            suite="fidelity",
            tasks="gsm8k",
            context=options.text_context,
            limit=options.texts,
            max_new_tokens=str(options.continuation),
            **shared,
        ),
    ]


def summarise(cells: Sequence[Cell]) -> list[Line]:
    """A line for every cell, task and metric."""
    from evictbench.stats.intervals import mean_interval, spread_interval

    lines = []
    for cell in cells:
        suite = cell.plan.checked.suite.name
        for metric in METRICS[suite]:
            by_task: dict[str, list[float]] = {}
            for (task, _, _), value in cell.values(metric).items():
                by_task.setdefault(task, []).append(value)
            for task, values in by_task.items():
                interval = mean_interval(values) if metric == "score" else spread_interval(values)
                low, high = interval or (None, None)
                lines.append(
                    Line(suite, task, cell.name, cell.budget or "", metric, len(values), fmean(values), low, high)
                )
    return lines


def write(lines: Sequence[Line], file: Path) -> None:
    """Write the lines as a CSV file, numbers to six figures."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([field.name for field in fields(Line)])
        for line in lines:
            values = asdict(line).values()
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m studies.oracle_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--budgets", default="128,256,512")
    parser.add_argument("--tasks", default=TASKS, help="of RULER")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a RULER sample, answer included")
    parser.add_argument("--samples", type=int, default=20, help="per RULER task")
    parser.add_argument("--texts", type=int, default=20, help="of GSM8K")
    parser.add_argument("--text-context", type=int, default=864, help="tokens of a text, continuation included")
    parser.add_argument("--continuation", type=int, default=96, help="tokens of a continuation at most")
    parser.add_argument("--model", default=bundled.NAME)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block", type=int, default=8, help="samples that go through all cells before the next ones")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/runs/compare"), help="folder for the runs")
    parser.add_argument("--folder", type=Path, default=Path("results/reference/oracle_study"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
