"""`evictbench trace`: show the cells' progress and their table, where the trace is, and what to type next."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evictbench.cli.progress import LOOKING
from evictbench.store.select import budget_bounds, budget_with_seen
from evictbench.store.trace_files import DECODE, OK, read_trace
from evictbench.terminal.console import command, console_for, describe, output_consoles, say, silence_libraries
from evictbench.terminal.waiting import Waiting

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from evictbench.trace.run import TracePlan
    from evictbench.trace.settings import TraceCell, TraceSettings

PARTS = ("attention_ms", "signals_ms", "policy_ms", "rest_ms")


def trace_and_show(settings: TraceSettings, as_json: bool, quiet: bool = False) -> int:
    """Trace on the terminal. Returns the exit code.

    Results go to stdout, progress to stderr. quiet: neither progress nor hints.
    """
    silence_libraries()
    report, hints = output_consoles(as_json, quiet)
    lines = TraceLines(console_for(stderr=True, quiet=quiet))
    try:
        with lines:
            lines.phase(LOOKING)
            from evictbench.trace.settings import check

            check(settings)  # before anything heavy is imported
            from evictbench.trace.run import finished_cells, make_plan, trace

            plan = make_plan(settings, lines.phase)
            lines.finished = finished_cells(plan)
            lines.end()
            describe(hints, "trace", description(plan, lines.finished))
            about = trace(plan, lines)
    except KeyboardInterrupt:
        print(
            f"Stopped; {lines.finished} finished cells are kept in {settings.folder}. To go on: {command()}",
            file=sys.stderr,
        )
        return 130
    _, steps = read_trace(settings.folder)
    report.print(cell_table(about, steps))
    for line in legend(about):
        say(hints, line)
    if as_json:
        print(json.dumps(about, indent=2, ensure_ascii=False))
    say(hints, f"written to {settings.folder}")
    say(hints, f"next: evictbench plot {shlex.quote(str(settings.folder))}")
    return 0


class TraceLines(Waiting):
    """Follows a trace (`evictbench.trace.run.Watcher`) and writes a line for each cell. Use as a context manager.

    finished: how many cells are measured, those of earlier commands included."""

    finished = 0

    def phase(self, text: str) -> None:
        """A step begins that takes a while."""
        self.begin(text)

    def cell_done(self, number: int, total: int, cell: TraceCell, record: Mapping[str, Any]) -> None:
        """Cell `number` of `total` is measured. record: its entry in the trace's summary."""
        self.end()
        self.finished = number
        say(self.console, f"{number}/{total} {cell}: {_in_words(record)}")


def description(plan: TracePlan, finished: int) -> list[tuple[str, Sequence[str]]]:
    """What is about to be traced, defaults spelled out: headings with their texts. finished: cells there already."""
    settings, checked = plan.settings, plan.checked
    policies = []
    for label, chosen in checked.chosen.items():
        notes = [f"{name}={value}" for name, value in chosen.settings.items()]
        notes += [f"weights {plan.origins[label]}"] if plan.origins[label] else []
        policies.append(f"{chosen.name} ({', '.join(notes)})" if notes else chosen.name)
    budgets = list(dict.fromkeys(cell.budget for cell in checked.cells if cell.budget))
    rows = sorted({cell.rows for cell in checked.cells})
    contexts = sorted({cell.context for cell in checked.cells})
    text = "tokens drawn from the seed" if settings.text is None else str(settings.text)
    snapshots = "not noted" if settings.retention is None else f"every {settings.retention} tokens, longest context"
    return [
        ("model", [f"{plan.model}, {plan.dtype}, device {plan.device}"]),
        ("policies", policies),
        ("budget", [f"{', '.join(budgets)} entries per KV head" if budgets else "none"]),
        ("contexts", [f"{', '.join(f'{context:,}' for context in contexts)} tokens, {settings.new_tokens} new ones"]),
        ("rows", [", ".join(map(str, rows))]),
        ("text", [f"{text}, seed {settings.seed}"]),
        ("prefill", [f"{settings.prefill}, chunks of {settings.chunk} tokens"]),
        ("kept", [f"positions {snapshots}"]),
        ("folder", [str(settings.folder)]),
        ("cells", [f"{len(checked.cells)}" + (f", {finished} there from before" if finished else "")]),
    ]


def cell_table(about: Mapping[str, Any], steps: pd.DataFrame) -> Table:
    """One row for each cell: time to first token, a decode step and its parts, memory, and the bandwidth at which
    decode reads, as a share of the machine's copy bandwidth. about: the trace's summary. steps: its steps."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), title=f"{about['model']}, {about['device']}")
    for name in ("policy", "budget"):
        table.add_column(name, overflow="fold")
    for name in (
        "context",
        "rows",
        "first token s",
        "step ms",
        "attention",
        "signals",
        "policy",
        "rest",
        "tokens/s",
        "cache MB",
        "peak MB",
        "read GB/s",
        "of copy",
    ):
        table.add_column(name, justify="right", overflow="fold")
    for cell in about["cells"]:
        own = steps[(steps["cell"] == cell["cell"]) & (steps["phase"] == DECODE) & (steps["status"] == OK)]
        table.add_row(*_line(cell, own))
    return table


def legend(about: Mapping[str, Any]) -> list[str]:
    """Lines that explain the table's numbers and name the machine's copy bandwidth."""
    lines = [
        "medians over decode steps, in ms; cache and peak (all memory in use): the most in decode",
        f"read: weights ({about['read_weight_bytes'] / 1e6:,.0f} MB) and kept keys and values, once a step; this "
        f"machine copies {about['copy_bandwidth'] / 1e9:,.1f} GB/s, read and written",
    ]
    random = [label for label, policy in about["policies"].items() if policy["weights"] == "random"]
    if random:
        lines.append(f"random weights, whose choices mean nothing: {', '.join(random)}")
    return lines


def _line(cell: Mapping[str, Any], steps: pd.DataFrame) -> Sequence[str]:
    from rich.markup import escape

    first = cell.get("first_token_seconds")
    budget = cell["budget"] or ""
    if budget and len(steps):
        bound = budget_bounds([cell["policy"]])[cell["policy"]]
        budget = budget_with_seen(budget, bound, steps["entries_mean"].mean(), steps["entries_max"].max())
    texts = [
        escape(cell["policy"]),
        budget,
        f"{cell['context']:,}",
        str(cell["rows"]),
        "" if first is None else f"{first:.3g}",
    ]
    if cell["status"] != OK:
        return [*texts, f"[yellow]{cell['status']}[/]"]
    medians = [f"{steps[name].median():.3g}" for name in ("ms", *PARTS)]
    speed = cell["read_bytes_per_second"]
    return [
        *texts,
        *medians,
        f"{1000 * cell['rows'] / cell['decode_ms']:,.1f}",
        f"{cell['decode_cache_bytes'] / 1e6:,.1f}",
        f"{cell['decode_peak_bytes'] / 1e6:,.0f}",
        f"{speed / 1e9:,.1f}",
        f"{speed / cell['copy_bandwidth']:.0%}",
    ]


def _in_words(record: Mapping[str, Any]) -> str:
    if record["status"] != OK:
        return str(record["status"])
    return f"first token after {record['first_token_seconds']:.3g} s, {record['decode_ms']:.3g} ms a step"
