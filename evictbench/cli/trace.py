"""`evictbench trace`: watch the cells, show the table, say where the trace is and what to type next."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evictbench.cli.progress import LOOKING
from evictbench.store.trace_files import DECODE, OK, read_trace
from evictbench.terminal.console import command, console_for, describe, quieten, say
from evictbench.terminal.waiting import Waiting

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from evictbench.trace.run import Plan
    from evictbench.trace.settings import Cell, Settings

PARTS = ("attention_ms", "signals_ms", "policy_ms", "rest_ms")


def trace_and_show(settings: Settings, as_json: bool, quiet: bool = False) -> int:
    """Trace on the terminal; the exit code. Results go to stdout, progress to stderr; quiet: no progress, no hints."""
    quieten()
    report = console_for(stderr=as_json, quiet=quiet and as_json)
    words = console_for(stderr=as_json, quiet=quiet)
    try:
        with TraceLines(console_for(stderr=True, quiet=quiet)) as lines:
            lines.phase(LOOKING)
            from evictbench.trace.settings import check

            check(settings)  # before anything heavy is imported
            from evictbench.trace.run import finished_cells, make_plan, trace

            plan = make_plan(settings, lines.phase)
            finished = finished_cells(plan)
            lines.end()
            describe(words, "trace", description(plan, finished))
            about = trace(plan, lines)
    except KeyboardInterrupt:
        print(f"Stopped; finished cells are kept in {settings.folder}. To go on: {command()}", file=sys.stderr)
        return 130
    _, steps = read_trace(settings.folder)
    report.print(cell_table(about, steps))
    for line in legend(about):
        say(words, line)
    if as_json:
        print(json.dumps(about, indent=2, ensure_ascii=False))
    say(words, f"written to {settings.folder}")
    say(words, f"next: evictbench plot {shlex.quote(str(settings.folder))}")
    return 0


class TraceLines(Waiting):
    """Watches a trace (`evictbench.trace.run.Watcher`). Use as a context manager."""

    def phase(self, text: str) -> None:
        """Something begins that takes a while."""
        self.begin(text)

    def cell_done(self, number: int, of: int, cell: Cell, found: Mapping[str, Any]) -> None:
        """A cell is measured."""
        self.end()
        say(self.console, f"{number}/{of} {cell}: {_in_words(found)}")


def description(plan: Plan, finished: int) -> list[tuple[str, Sequence[str]]]:
    """What is about to be traced, defaults spelled out."""
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
    looks = "not noted" if settings.retention is None else f"every {settings.retention} tokens, longest context"
    return [
        ("model", [f"{plan.model}, {plan.dtype}, device {plan.device}"]),
        ("policies", policies),
        ("budget", [f"{', '.join(budgets)} entries per KV head" if budgets else "none"]),
        ("contexts", [f"{', '.join(f'{context:,}' for context in contexts)} tokens, {settings.new_tokens} new ones"]),
        ("rows", [", ".join(map(str, rows))]),
        ("text", [f"{text}, seed {settings.seed}"]),
        ("prefill", [f"{settings.prefill}, chunks of {settings.chunk} tokens"]),
        ("kept", [f"positions {looks}"]),
        ("folder", [str(settings.folder)]),
        ("cells", [f"{len(checked.cells)}" + (f", {finished} there from before" if finished else "")]),
    ]


def cell_table(about: Mapping[str, Any], steps: pd.DataFrame) -> Table:
    """One line a cell: time to first token, a decode step and its parts, memory, and how much of the machine's copy
    bandwidth decode reads at."""
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
    """What the table's numbers are, and the bandwidth that they are held against."""
    lines = [
        "medians over decode steps, in ms; cache and peak (all memory in use): the most in decode",
        f"read: weights ({about['read_weight_bytes'] / 1e6:,.0f} MB) and kept keys and values, once a step; this "
        f"machine copies {about['copy_bandwidth'] / 1e9:,.1f} GB/s, read and written",
    ]
    random = [label for label, one in about["policies"].items() if one["weights"] == "random"]
    if random:
        lines.append(f"random weights, whose choices mean nothing: {', '.join(random)}")
    return lines


def _line(cell: Mapping[str, Any], steps: pd.DataFrame) -> Sequence[str]:
    from rich.markup import escape

    first = cell.get("first_token_seconds")
    words = [
        escape(cell["policy"]),
        cell["budget"] or "",
        f"{cell['context']:,}",
        str(cell["rows"]),
        "" if first is None else f"{first:.3g}",
    ]
    if cell["status"] != OK:
        return [*words, f"[yellow]{cell['status']}[/]"]
    medians = [f"{steps[name].median():.3g}" for name in ("ms", *PARTS)]
    speed = cell["read_bytes_per_second"]
    return [
        *words,
        *medians,
        f"{1000 * cell['rows'] / cell['decode_ms']:,.1f}",
        f"{cell['decode_cache_bytes'] / 1e6:,.1f}",
        f"{cell['decode_peak_bytes'] / 1e6:,.0f}",
        f"{speed / 1e9:,.1f}",
        f"{speed / cell['copy_bandwidth']:.0%}",
    ]


def _in_words(found: Mapping[str, Any]) -> str:
    if found["status"] != OK:
        return str(found["status"])
    return f"first token after {found['first_token_seconds']:.3g} s, {found['decode_ms']:.3g} ms a step"
