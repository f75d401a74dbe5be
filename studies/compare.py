"""Do named policies beat the others on the same samples? Fidelity on GSM8K test text, and RULER's needles.

    python -m studies.compare fidelity --data-dir DATA --policies h2o,tova,kvpop:label=mean,oracle
    python -m studies.compare ruler --policies h2o,tova,kvpop:label=max,oracle:label=max --budgets 256
    python -m studies.compare ruler --policies ... --part 1/2      # every other cell; another process takes 2/2
    python -m studies.compare ruler --policies ... --table         # only show what is there

Policies are named as on the command line; `kvpop:label=max@FOLDER` takes its weights from a folder. Finished samples
are not run again. Each policy of --test (learned ones and oracles by default) is compared with every training-free one,
paired by document: the sign-flip test of the mean difference, and the exact sign test, which for right-or-wrong answers
is McNemar's (`evictbench.stats.paired`). Times in these folders are not those of ordinary runs: all cells share what
is computed once a text (`studies.replay`).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from evictbench.evaluation.settings import CHOICES, RunSettings
from evictbench.models import bundled
from evictbench.registry import split_policies
from studies.command import exit_code, in_part, part, say

if TYPE_CHECKING:
    from studies.cells import Cell

POLICIES = "full,random,streaming_llm,tova,h2o,snapkv,snapkv:decode=reselect,oracle:label=mean,oracle:label=max"

WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "fidelity": {"tasks": "gsm8k", "context": 864, "max_new_tokens": "96", "limit": 50},
    "ruler": {
        "tasks": "niah_single_1,niah_single_2,niah_single_3,niah_multikey_1",
        "context": 1024,
        "max_new_tokens": "auto",
        "limit": 50,
    },
}
"""By suite: tasks, tokens in all, tokens of a continuation or answer at most, samples per task."""

METRICS: Mapping[str, tuple[tuple[str, bool], ...]] = {
    "fidelity": (("kl", False), ("nll", False), ("agreement", True)),
    "ruler": (("score", True),),
}
"""By suite: the metrics that are compared, and whether more of each is better."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return exit_code(_compare, _options(arguments))


def _compare(options: argparse.Namespace) -> int:
    from studies.cells import plan_cells, run_cells

    common = RunSettings(
        policy="full",
        suite=options.suite,
        tasks=options.tasks,
        context=options.context,
        limit=options.limit,
        max_new_tokens=options.max_new_tokens,
        model=options.model,
        seed=options.seed,
        prefill=options.prefill,
        batch_size=options.block,
        device=options.device,
        dtype=options.dtype,
        data_dir=options.data_dir,
        haystack=options.haystack,
        out=options.out,
    )
    budgets = [budget.strip() for budget in options.budgets.split(",")]
    cells = plan_cells(split_policies(options.policies), budgets, common, say)
    if not options.table and not run_cells(in_part(cells, options.part), options.block, say):
        say("stopped; what is finished is kept")
        return 130
    if options.csv is not None:
        write_samples(cells, METRICS[options.suite], options.csv)
    tested = split_policies(options.test) if options.test else None
    for metric, more_is_better in METRICS[options.suite]:
        for line in table(cells, metric, more_is_better, tested):
            print(line)
    return 0


def write_samples(cells: Sequence[Cell], metrics: Sequence[tuple[str, bool]], file: Path) -> None:
    """Write a CSV file with a line per cell and sample: policy, budget, task, document, and the metrics."""
    names = [name for name, _ in metrics]
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["policy", "budget", "task", "document", *names])
        for cell in cells:
            values = {name: cell.values(name) for name in names}
            for key in sorted(values[names[0]]):
                numbers = (f"{values[name][key]:.6g}" for name in names)
                writer.writerow([cell.name, cell.budget or "", *key[:2], *numbers])


def _seen(cell: Cell) -> str:
    """The entries that queries saw, where the policy's budget is no bound."""
    from evictbench.store.select import entries_seen

    if cell.budget is None or cell.plan.policy.enforces_budget:
        return ""
    means, most = (cell.values(name).values() for name in ("occupancy_mean", "occupancy_max"))
    return f"  {entries_seen(fmean(means), max(most))}"


def table(cells: Sequence[Cell], metric: str, more_is_better: bool, tested: Sequence[str] | None = None) -> list[str]:
    """Lines of text: every cell's mean with its interval, then each tested policy against every training-free one.

    tested: the names of these policies, as the cells have them; None: all learned ones and oracles.
    """
    from evictbench.stats.intervals import mean_interval, spread_interval
    from evictbench.stats.paired import difference
    from evictbench.store.select import reading_words

    samples = {cell.title: cell.values(metric) for cell in cells if cell.plan.folder.exists()}
    documents = {title: {key[:2]: value for key, value in values.items()} for title, values in samples.items()}
    modes = {cell.plan.settings.prefill for cell in cells if cell.budget is not None}
    reading = reading_words(modes, {cell.plan.checked.protocol.question for cell in cells})
    lines = ["", f"{metric} ({'more' if more_is_better else 'less'} is better); 95% intervals; {reading}"]
    width = max(len(cell.title) for cell in cells)
    for cell in cells:
        values = list(samples.get(cell.title, {}).values())
        if values:
            scores = metric == "score" and all(value in (0, 1) for value in values)
            interval = mean_interval(values) if scores else spread_interval(values)
            spread = "" if interval is None else f"  {interval[0]:8.4f} to {interval[1]:8.4f}"
            lines.append(f"  {cell.title:<{width}}  {fmean(values):8.4f}{spread}  n {len(values)}{_seen(cell)}")
    for budget in dict.fromkeys(cell.budget for cell in cells if cell.budget is not None):
        cells_here = [cell for cell in cells if cell.budget == budget and samples.get(cell.title)]
        others = [cell for cell in cells_here if cell.kind == "training-free"]
        for cell in cells_here:
            if cell.name not in tested if tested is not None else cell.kind not in ("learned", "oracle"):
                continue
            lines.append(f"  {cell.title} against")
            for other in others:
                if other is cell:
                    continue
                pair = difference(documents[cell.title], documents[other.title])
                if pair is None:
                    continue
                better = (pair.value > 0) == more_is_better and pair.value != 0
                spread = "" if pair.low is None else f" ({pair.low:+.4f} to {pair.high:+.4f})"
                lines.append(
                    f"    {other.name:<{width}}  {pair.value:+.4f}{spread}  sign-flip p {pair.p_value():.2g}, "
                    f"sign test p {pair.sign_test():.2g} ({pair.wins} above, {pair.losses} below, n {pair.documents})"
                    f"{', better' if better else ''}"
                )
            lines += _closed_gaps(cell, cells_here, samples)
    return lines


def _closed_gaps(cell: Cell, cells: Sequence[Cell], samples: Mapping[str, Mapping[Any, float]]) -> list[str]:
    """The share of the gap from h2o to each oracle that a learned policy closes, on the samples that all three have."""
    h2o = next((other for other in cells if other.name == "h2o"), None)
    if h2o is None or cell.kind != "learned":
        return []
    lines = []
    for oracle in (other for other in cells if other.kind == "oracle"):
        common = samples[cell.title].keys() & samples[h2o.title].keys() & samples[oracle.title].keys()
        if not common:
            continue
        mean, low, high = (fmean(samples[other.title][key] for key in common) for other in (cell, h2o, oracle))
        if high != low:
            lines.append(f"    closes {(mean - low) / (high - low):.0%} of the gap between h2o and {oracle.name}")
    return lines


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m studies.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=list(WORKLOADS))
    parser.add_argument("--policies", default=POLICIES, help=f"default: {POLICIES}")
    parser.add_argument("--test", help="policies to test against the training-free ones, by the names they have here")
    parser.add_argument("--budgets", default="128,256")
    parser.add_argument("--tasks", help="of the suite; default: GSM8K text, or RULER's noise and needles")
    parser.add_argument("--context", type=int, help="tokens of a sample, answer or continuation included")
    parser.add_argument("--limit", type=int, help="samples per task (default 50)")
    parser.add_argument("--max-new-tokens", help="tokens of a continuation or answer at most")
    parser.add_argument("--prefill", choices=CHOICES["prefill"], default="native")
    parser.add_argument("--csv", type=Path, help="write every sample's values to this file as well")
    parser.add_argument("--model", default=bundled.NAME)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block", type=int, default=8, help="samples that go through all cells before the next ones")
    parser.add_argument("--part", type=part, default=(1, 1), help="1/2: only the first of two halves of the cells")
    parser.add_argument("--table", action="store_true", help="run nothing, show what is finished")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--haystack", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/runs/compare"))
    options = parser.parse_args(arguments)
    for name, value in WORKLOADS[options.suite].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.block < 1:
        parser.error("--block is at least 1")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
