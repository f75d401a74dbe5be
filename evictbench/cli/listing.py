"""What can be named on the command line, and what is in order on this machine: rows, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from evictbench import registry
from evictbench.errors import UserError
from evictbench.terminal.console import console_for

if TYPE_CHECKING:
    from evictbench.store.published_number import Published

Row = dict[str, Any]

LISTED = 14
"""Items of a list that a table shows whole; of a longer one it shows the first half of that."""


def policies() -> list[Row]:
    """Every policy: its name, what it is, its paper, its settings with their defaults, and what it declares."""
    rows: list[Row] = []
    for name in registry.names(registry.POLICIES):
        try:
            policy = registry.load_policy(name)
            default = policy.Config()
        except UserError as error:
            rows.append({"name": name, "summary": str(error)})
            continue
        rows.append(
            {
                "name": name,
                "summary": policy.summary,
                "paper": policy.paper,
                "settings": {field.name: getattr(default, field.name) for field in fields(default)},
                "budget": policy.needs_budget,
                "learned": policy.learned,
                "prefill": policy.prefill,
                "shares": policy.shares,
                "signals": sorted(policy.signals),
            }
        )
    return rows


def suites() -> list[Row]:
    """Every suite: its name, what it is, its defaults and its tasks."""
    rows: list[Row] = []
    for name in registry.names(registry.SUITES):
        try:
            suite = registry.load_suite(name)
        except UserError as error:
            rows.append({"name": name, "summary": str(error)})
            continue
        rows.append(
            {
                "name": name,
                "summary": suite.summary,
                "question": suite.question,
                "context": suite.default_context,
                "limit": suite.default_limit,
                "protocols": list(suite.protocols) or ["default"],
                "tasks": list(suite.tasks),
            }
        )
    return rows


def models() -> list[Row]:
    """The models to start with."""
    from evictbench.models.load import MODELS

    return [{field.name: getattr(model, field.name) for field in fields(model)} for model in MODELS]


def published(policies: str | None, papers: str | None, suites: str | None, *, whole: bool) -> list[Row]:
    """The numbers of papers, of those that these comma lists name; whole: every field, not only what a table shows."""
    from evictbench.store.published import read_published, select

    found = select(
        read_published(),
        registry.split_policies(policies) if policies else (),
        *([name.strip() for name in (names or "").split(",") if name.strip()] for names in (papers, suites)),
    )
    return [asdict(entry) if whole else _in_short(entry) for entry in found]


def _in_short(entry: Published) -> Row:
    spread = "" if entry.spread is None else f" ± {entry.spread:g}"
    context = f" at {entry.protocol['context']}" if "context" in entry.protocol else ""
    return {
        "paper": " ".join(filter(None, (entry.paper, entry.version))),
        "source": entry.source,
        "model": entry.model.rpartition("/")[2],
        "policy": entry.policy,
        "budget": entry.budget,
        "task": f"{entry.suite}/{entry.task}{context}",
        "metric": entry.metric,
        "value": f"{entry.value:.10g}{spread}",
        "full": None if entry.full is None else f"{entry.full:.10g}",
        "unit": entry.unit,
        "sure": f"{entry.confidence}, contradicted" if entry.contradiction else entry.confidence,
    }


def checks() -> list[Row]:
    """What `evictbench doctor` finds."""
    from evictbench.cli.doctor import report

    return [{name: getattr(check, name) for name in ("name", "status", "sentence", "remedy")} for check in report()]


def show(rows: Sequence[Row], as_json: bool, quiet: bool = False) -> None:
    """Print rows as a table, or as JSON; quiet: the names alone, one a line, or where rows have no name what they hold,
    with tabs between."""
    from rich import box
    from rich.table import Table

    if as_json:
        return _print_json(rows)
    if quiet:
        for row in rows:
            print(row["name"] if "name" in row else "\t".join(map(_plain, row.values())))
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        table.add_column(name, no_wrap=name == "name", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    console_for(stderr=False).print(table)


def show_checks(rows: Sequence[Row], as_json: bool, quiet: bool = False) -> None:
    """Print what the doctor found, one line each, with what to do below it; or as JSON; quiet: what is not in order."""
    if as_json:
        return _print_json(rows)
    console = console_for(stderr=False)
    width = max(len(row["name"]) for row in rows)
    rows = [row for row in rows if not quiet or row["status"] != "ok"]
    colours = {"ok": "green", "warn": "yellow", "missing": "red"}
    for row in rows:
        status = f"[{colours[row['status']]}]{row['status']:<7}[/]"
        console.print(
            f"{status}  {_cell(row['name']):<{width}}  {_cell(row['sentence'])}", soft_wrap=True, highlight=False
        )
        if row["remedy"]:
            console.print(f"{'':<{width + 11}}{_cell(row['remedy'])}", soft_wrap=True, highlight=False, style="dim")


def _print_json(rows: Sequence[Row]) -> None:
    import json

    print(json.dumps(list(rows), indent=2, ensure_ascii=False))


def _cell(value: Any) -> str:
    from rich.markup import escape

    return escape(_plain(value))


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}={inner}" for name, inner in value.items())
    if isinstance(value, list):
        shown = value if len(value) <= LISTED else [*value[: LISTED // 2], f"… {len(value)} in all (--json)"]
        return ", ".join(map(str, shown))
    return str(value)
