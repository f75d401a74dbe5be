"""What a data folder holds, suite by suite: `evictbench doctor --data-dir`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evictbench import registry
from evictbench.errors import UserError
from evictbench.suite.survey import DataFound
from evictbench.terminal.console import console_for

NAMED = 6
"""Names in a sentence of the table; of more, it gives the number."""

Entry = dict[str, Any]


def look(data_dir: Path) -> list[Entry]:
    """Each suite that reads data, with every data set of it: where it is, how many documents it has, and of how many.

    Raises UserError for a folder that is not there.
    """
    if not data_dir.is_dir():
        raise UserError(f"There is no folder {data_dir} (--data-dir).")
    entries = []
    for name in registry.names(registry.SUITES):
        survey = registry.load_suite(name).survey
        if survey is not None:
            entries.append(_entry(name, survey(data_dir)))
    return entries


def show(entries: Sequence[Entry], as_json: bool, quiet: bool = False) -> None:
    """Print the entries as a table and what is missing below it, or as JSON. quiet: only suites that lack something."""
    import json

    from rich import box
    from rich.markup import escape
    from rich.table import Table

    if as_json:
        print(json.dumps(list(entries), indent=2, ensure_ascii=False))
        return
    console = console_for(stderr=False)
    shown = [entry for entry in entries if not quiet or _lacks(entry)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in ("suite", "found", "documents", "where"):
        table.add_column(column, no_wrap=column != "where", overflow="fold")
    for entry in shown:
        sets = entry["data"]
        present = [found for found in sets if found["documents"]]
        counts = _of(entry["documents"], entry["known"]) if present else "none"
        table.add_row(entry["suite"], _of(len(present), len(sets)), counts, escape(_place(present)))
    console.print(table)
    for entry in shown:
        for sentence in _lacks(entry):
            console.print(f"{entry['suite']}: {escape(sentence)}", soft_wrap=True, highlight=False)


def _entry(suite: str, data: Sequence[DataFound]) -> Entry:
    known = [found.known for found in data]
    return {
        "suite": suite,
        "documents": sum(found.documents for found in data),
        "known": None if None in known else sum(number for number in known if number is not None),
        "data": [
            {
                "name": found.name,
                "where": found.where or None,
                "documents": found.documents,
                "known": found.known,
                "missing": max(0, found.known - found.documents) if found.known is not None else None,
                "problem": found.problem or None,
            }
            for found in data
        ],
    }


def _lacks(entry: Entry) -> list[str]:
    """Sentences about what a suite lacks in the folder; none where it has all its data."""
    sets = entry["data"]
    absent = [found["name"] for found in sets if not found["documents"] and not found["problem"]]
    part = [found for found in sets if found["documents"] and found["known"] not in (None, found["documents"])]
    sentences = [found["problem"] for found in sets if found["problem"]]
    if part:
        counts = [f"{found['name']} has {_of(found['documents'], found['known'])}" for found in part]
        sentences.append(f"not whole: {_listed(counts)}.")
    if absent and len(absent) < len(sets):
        sentences.append(f"not there: {_listed(absent)}.")
    elif absent:
        sentences.append("nothing of it is there.")
    return sentences


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= NAMED else f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"


def _of(count: int, known: int | None) -> str:
    return f"{count:,}" if known is None else f"{count:,} of {known:,}"


def _place(present: Sequence[Entry]) -> str:
    """The one place of data sets, or the folder that holds all their files."""
    places = [found["where"] for found in present]
    if len(places) <= 2:
        return ", ".join(places)
    folder = os.path.commonpath(places)
    return f"{folder}/" if folder else f"{places[0]} and others"
