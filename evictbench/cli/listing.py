"""What `evictbench list` and `evictbench doctor` show: rows of names or checks, printed as a table or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from evictbench import registry
from evictbench.errors import UserError
from evictbench.terminal.console import console_for

if TYPE_CHECKING:
    from evictbench.store.published_number import Published

Row = dict[str, Any]

LISTED = 14
"""The longest list that a table shows whole. Of a longer one it shows half as many items."""


def policies() -> list[Row]:
    """Every policy: its name, what it is, its paper, its settings with their defaults, and what it declares."""

    def row(name: str) -> Row:
        policy = registry.load_policy(name)
        default = policy.Config()
        return {
            "name": name,
            "summary": policy.summary,
            "paper": policy.paper,
            "settings": {field.name: getattr(default, field.name) for field in fields(default)},
            "budget": policy.needs_budget,
            "learned": policy.learned,
            "prefill": policy.prefill,
            "shares": getattr(policy, "granularity", "head"),
            "signals": sorted(getattr(policy(default), "signals", ())),
        }

    return [_or_error(row, name) for name in registry.names(registry.POLICIES)]


def suites() -> list[Row]:
    """Every suite: its name, what it is, its defaults and its tasks."""

    def row(name: str) -> Row:
        suite = registry.load_suite(name)
        return {
            "name": name,
            "summary": suite.summary,
            "question": suite.question,
            "context": suite.default_context,
            "limit": suite.default_limit,
            "protocols": list(suite.all_protocols),
            "tasks": list(suite.tasks),
        }

    return [_or_error(row, name) for name in registry.names(registry.SUITES)]


def models() -> list[Row]:
    """Models to start with."""
    from evictbench.models.load import MODELS

    return [{field.name: getattr(model, field.name) for field in fields(model)} for model in MODELS]


def published(policies: str | None, papers: str | None, suites: str | None, *, whole: bool) -> list[Row]:
    """The numbers of papers. policies, papers, suites: comma lists of those wanted; None for all. whole: with every
    field, not only what a table shows, and the commands whose runs a gate would hold against the number."""
    from evictbench.gate.wanted import commands

    chosen = _chosen(policies, papers, suites)
    return [asdict(entry) | {"runs": commands(entry)} if whole else _in_short(entry) for entry in chosen]


def unmatched(policies: str | None, papers: str | None, suites: str | None, *, whole: bool) -> list[Row]:
    """The numbers under eviction that no run here can match, each with what is missing. The arguments are those of
    `published`."""
    from evictbench.gate.wanted import missing
    from evictbench.store.select import FULL

    return [
        (asdict(entry) if whole else _in_short(entry)) | {"missing": reason}
        for entry in _chosen(policies, papers, suites)
        if entry.policy != FULL and (reason := missing(entry)) is not None
    ]


def reach(policies: str | None, papers: str | None, suites: str | None) -> str:
    """A sentence about how many of the scores under eviction a run here can match. The arguments are those of
    `published`."""
    from evictbench.gate.wanted import is_score, missing, wanted

    scores = [entry for entry in _chosen(policies, papers, suites) if is_score(entry)]
    ours = [entry for entry in scores if wanted(entry).policy_name in registry.names(registry.POLICIES)]
    count = sum(missing(entry) is None for entry in ours)
    return (
        f"A run here can match {count} of {len(scores)} scores and retentions under eviction, "
        f"{len(ours)} of which are of policies that are here."
    )


def checks() -> list[Row]:
    """The checks of `evictbench doctor`."""
    from evictbench.cli.doctor import report

    return [{name: getattr(check, name) for name in ("name", "status", "sentence", "remedy")} for check in report()]


def show(rows: Sequence[Row], as_json: bool, quiet: bool = False) -> None:
    """Print rows as a table, or as JSON. quiet: one line for each row, with its name alone or, where rows have no name,
    its values with tabs between."""
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
    """Print the doctor's checks as JSON, or one a line with the remedy below. quiet: only what is not in order."""
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


def _chosen(policies: str | None, papers: str | None, suites: str | None) -> list[Published]:
    """The numbers of papers that are wanted, in the order of the files."""
    from evictbench.store.published import read_published, select

    return select(
        read_published(),
        registry.split_policies(policies) if policies else (),
        *([name.strip() for name in (names or "").split(",") if name.strip()] for names in (papers, suites)),
    )


def _or_error(make: Callable[[str], Row], name: str) -> Row:
    """The row of a name, or the sentence that says why it does not load."""
    try:
        return make(name)
    except UserError as error:
        return {"name": name, "summary": str(error)}


def _in_short(entry: Published) -> Row:
    """A published number as a table shows it."""
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
