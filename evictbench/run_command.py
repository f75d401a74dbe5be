"""`evictbench run`: watch a run, show its table, say where it is and what to type next."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from evictbench import registry, table
from evictbench.console import command, console_for, describe, quieten, say
from evictbench.errors import UserError
from evictbench.progress import LOOKING, ProgressLine
from evictbench.run import run

if TYPE_CHECKING:
    from evictbench.plan import Plan
    from evictbench.settings import Settings


def run_and_show(settings: Settings, as_json: bool, quiet: bool = False) -> int:
    """Run a cell on the terminal; the exit code. Results go to stdout, progress and warnings to stderr; quiet: neither
    progress nor hints."""
    quieten()
    report = console_for(stderr=as_json, quiet=quiet and as_json)
    words = console_for(stderr=as_json, quiet=quiet)

    def planned(plan: Plan, finished: int) -> None:
        describe(words, "run", [(heading, (text,)) for heading, text in table.describe(plan, finished)])

    try:
        with ProgressLine(console_for(stderr=True, quiet=quiet), planned) as progress:
            progress.phase(LOOKING)
            outcome = run(settings, progress)
    except KeyboardInterrupt:
        print("Stopped before the first sample.", file=sys.stderr)
        return 130
    summary = outcome.summary
    if summary["tasks"]:
        report.print(*table.result_tables(summary, report))
        say(words, table.LEGEND)
    if as_json:
        print(json.dumps(summary, indent=2, ensure_ascii=False))
    say(words, f"written to {outcome.plan.folder}")
    if outcome.interrupted:
        kept = summary["mean"]["samples"] if summary["mean"] else 0
        print(f"Stopped; {kept} finished samples are kept. To go on: {command()}", file=sys.stderr)
        return 130
    say(words, f"next: {_next(outcome.plan)}")
    return 0


def _next(plan: Plan) -> str:
    """The command that puts this row beside its yardstick, or the way to rows to put beside the yardstick."""
    if plan.checked.budget is None:
        return "evictbench list policies, then the same command with --policy NAME --budget 25%"
    for name in registry.names(registry.POLICIES):
        with suppress(UserError):  # a policy that does not load is no yardstick
            if not registry.load_policy(name).needs_budget:
                return plan.settings.command(policy=name, budget=None, weights=None)
    return "evictbench list policies"
