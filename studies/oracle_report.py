"""The oracle study's plot and its README, made from the measured lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evictbench.evaluation.settings import RunSettings

SHOWN = {"ruler": "score", "fidelity": "kl"}
"""By suite: the metric that is drawn."""


@dataclass(frozen=True)
class Line:
    """A mean over samples. budget: "" for the full cache. low, high: the mean's 95% interval; None for one sample."""

    suite: str
    task: str
    policy: str
    budget: str
    metric: str
    samples: int
    mean: float
    low: float | None
    high: float | None


def draw(lines: Sequence[Line], folder: Path) -> None:
    """Write plot.svg and plot.png: a panel per task over the budget, with the full cache as a dashed line."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "evictbench"
    from matplotlib import pyplot

    shown = [line for line in lines if SHOWN[line.suite] == line.metric]
    panels = list(dict.fromkeys((line.suite, line.task) for line in shown))
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.2 * columns, 2.8 * rows), squeeze=False)
    policies = list(dict.fromkeys(line.policy for line in shown if line.budget))
    for axis, (suite, task) in zip(axes.flat, panels, strict=False):
        here = [line for line in shown if (line.suite, line.task) == (suite, task)]
        budgets = sorted({int(line.budget) for line in here if line.budget})
        for number, policy in enumerate(policies):
            points = sorted((line for line in here if line.policy == policy), key=lambda line: int(line.budget))
            below = [line.mean - (line.mean if line.low is None else line.low) for line in points]
            above = [(line.mean if line.high is None else line.high) - line.mean for line in points]
            x = [int(line.budget) * 1.03 ** (number - (len(policies) - 1) / 2) for line in points]
            axis.errorbar(
                x,
                [line.mean for line in points],
                yerr=[[max(0.0, gap) for gap in below], [max(0.0, gap) for gap in above]],
                marker="o",
                capsize=2,
                label=policy,
                color=f"C{number}",
            )
        for line in here:
            if not line.budget and suite == "ruler":
                axis.axhline(line.mean, linestyle="--", color="0.5", linewidth=1, label=line.policy)
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [str(budget) for budget in budgets], minor=False)
        axis.set_title(f"{suite}: {task}", fontsize=9)
        axis.set_ylabel("score" if suite == "ruler" else "KL to the full cache, nats", fontsize=8)
        axis.set_xlabel("entries per KV head", fontsize=8)
        axis.tick_params(labelsize=8)
        if suite == "ruler":
            axis.set_ylim(-0.05, 1.05)
        else:
            axis.set_ylim(bottom=0)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    legend: dict[str, Any] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.legend(list(legend.values()), list(legend), loc="lower center", ncols=len(legend), fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(folder / "plot.svg", metadata={"Date": None})
    figure.savefig(folder / "plot.png", dpi=130)
    pyplot.close(figure)


def report(lines: Sequence[Line], runs: Sequence[RunSettings], model: str) -> str:
    """The text of README.md: the question, what was run, the numbers. runs: the settings, one per suite."""
    from evictbench.models import machine

    versions = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    text = [
        "# Which label is worth guessing?",
        "",
        "The oracle evicts by the future attention that a dense run over the same text knows: `label=mean` is KVpop's",
        "training target, `label=max` the largest single attention. Neither is a bound. Made by",
        "`python -m studies.oracle_study`; numbers in `data.csv`.",
        "",
        "![KL and scores by budget](plot.svg)",
        "",
        f"Model: {model}, {versions}. 95% intervals in brackets.",
        "",
    ]
    for run in runs:
        limit = f", at most {run.max_new_tokens} tokens of continuation" if run.suite == "fidelity" else ""
        size = f"{run.context} tokens, {run.limit} samples a task"
        text.append(f"- {run.suite}: {run.tasks}; {size}, seed {run.seed}{limit}")
    for suite in dict.fromkeys(line.suite for line in lines):
        for metric in dict.fromkeys(line.metric for line in lines if line.suite == suite):
            text += ["", *_table([line for line in lines if (line.suite, line.metric) == (suite, metric)])]
    return "\n".join(text) + "\n"


def _table(lines: Sequence[Line]) -> list[str]:
    rows = list(dict.fromkeys((line.policy, line.budget) for line in lines))
    tasks = list(dict.fromkeys(line.task for line in lines))
    by_cell = {(line.policy, line.budget, line.task): line for line in lines}
    head = ["policy", "budget", *tasks]
    table = [f"**{lines[0].suite}, {lines[0].metric}**", "", _row(head), _row(["---"] * len(head))]
    for policy, budget in rows:
        cells = [_number(by_cell.get((policy, budget, task))) for task in tasks]
        table.append(_row([f"`{policy}`", budget or "-", *cells]))
    return table


def _number(line: Line | None) -> str:
    if line is None:
        return "-"
    interval = "" if line.low is None or line.high is None else f" ({line.low:.3g} to {line.high:.3g})"
    return f"{line.mean:.3g}{interval}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
