"""Numbers from papers, each with where it stands: results/published/*.yaml read into one flat list.

A file is one paper. What its numbers share is written once, at the file, the table, the column or the row; the closer
one counts, but notes add up and protocols join. `results/published/README.md` explains the files to those who add one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from evictbench import yaml_file
from evictbench.errors import UserError, unknown
from evictbench.policy.budget import Budget
from evictbench.store.published_number import (
    OPTIONAL,
    PROTOCOL,
    UNITS,
    Confidence,
    Published,
    ShareOf,
    Trained,
    Weighting,
)
from evictbench.store.select import FULL

__all__ = ["Published", "read_published", "select"]

PACKAGE = "evictbench.results"

OF_A_CELL = ("value", "spread", "retention", "full_elsewhere", "contradiction")
"""Fields that a row may give as a list with an item for each column."""

SHAREABLE = tuple(field.name for field in fields(Published) if field.name not in ("full", *OF_A_CELL))
"""Fields that may be written once for several numbers."""

KEYS = {*SHAREABLE, *OF_A_CELL}
"""Fields that may be written at all."""

BY_POLICY = ("trained", "runs_as")
"""Fields that may be written as a mapping from the policy's name, without its settings, to the value."""

CHOICES: Mapping[str, Sequence[str]] = {
    "unit": tuple(UNITS),
    "confidence": get_args(Confidence),
    "trained": get_args(Trained),
    "weighting": get_args(Weighting),
    "share_of": get_args(ShareOf),
}
"""Fields with a few values, and which."""

TEXTS = (
    *("paper", "title", "version", "source", "model", "policy", "runs_as", "suite", "task", "metric", "note"),
    "contradiction",
)
"""Fields that have to be strings."""


def read_published(folder: Path | None = None) -> tuple[Published, ...]:
    """Every number of every file.

    folder: with .yaml files; None for the numbers that come with evictbench. Raises UserError that names file, line,
    entry and field if a field is missing, unknown or impossible, and for an entry that is there twice or a
    contradiction with one side only.
    """
    source = _installed() if folder is None else folder
    files = sorted(source.glob("*.yaml"))
    if not files:
        raise UserError(f"There are no published numbers in {source}: it holds no .yaml file.")
    entries = tuple(entry for file in files for entry in _of_file(file))
    for identity, count in Counter(entry.identity for entry in entries).items():
        if count > 1:
            raise UserError(f"A number is there twice: {', '.join(str(part) for part in identity if part)}.")
    sides = Counter(entry.contradiction for entry in entries if entry.contradiction)
    for name, count in sides.items():
        if count < 2:
            raise UserError(f"The contradiction {name} has one number only: give both, or take the name away.")
    return entries


def select(
    entries: Iterable[Published],
    policies: Sequence[str] = (),
    papers: Sequence[str] = (),
    suites: Sequence[str] = (),
) -> list[Published]:
    """The entries of these policies (named with or without settings), papers and suites; an empty list means all.

    Raises UserError for a name that no entry has, with the nearest name.
    """

    everything = list(entries)
    kept = everything
    wanted = {"policy": policies, "paper": papers, "suite": suites}
    for field, names in wanted.items():
        known = {getattr(entry, field) for entry in everything}
        known |= {label.partition(":")[0] for label in known if field == "policy"}
        for name in names:
            if name not in known:
                raise unknown(f"published {field}", name, known)
        if names:
            kept = [entry for entry in kept if {(label := getattr(entry, field)), label.partition(":")[0]} & {*names}]
    return kept


def _installed() -> Path:
    """The folder beside the package, found without importing it (it has the name of the function `results`)."""
    from importlib.util import find_spec

    spec = find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / "published").is_dir():
            return Path(location) / "published"
    raise UserError("The published numbers are not installed with this copy of evictbench: install it again.")


@dataclass(frozen=True)
class _Place:
    """Where in a file an entry stands, for sentences. lines: of every key, as `yaml_file.load_with_lines` has them.
    table: its index. source, name: of the table and of the row, "" where there is none. row: the row's index; None for
    the full cache's."""

    file: Path
    lines: Mapping[yaml_file.KeyPath, int]
    table: int
    source: str = ""
    row: int | None = None
    name: str = ""

    def at(self, field: str = "") -> str:
        """ "kvpop.yaml, line 12, table 1 (main table), row TOVA". field: the one that the sentence is about; the line
        is its own, or else the row's or the table's."""
        table: yaml_file.KeyPath = ("tables", self.table)
        row: yaml_file.KeyPath = (*table, "full_row") if self.row is None else (*table, "rows", self.row)
        paths = [(*row, field), (*table, "columns", field), (*table, field), (field,)] if field else []
        starts = (row, table) if self.name else (table,)
        line = next(line for path in (*paths, *starts) if (line := self.lines.get(path)) is not None)
        words = f"{self.file}, line {line}, table {self.table + 1}"
        words += f" ({self.source})" if self.source else ""
        return f"{words}, row {self.name}" if self.name else words


def _of_file(file: Path) -> Iterator[Published]:
    document, lines = yaml_file.load_with_lines(file)
    if not isinstance(document, dict) or not isinstance(document.get("tables"), list):
        raise UserError(f"{file}: the field tables is missing, a list of the paper's tables.")
    tables = document.pop("tables")
    for number, table in enumerate(tables):
        place = _Place(file, lines, number)
        if not isinstance(table, dict):
            raise UserError(f"{place.at()} is not a mapping of fields.")
        yield from _of_table(replace(place, source=str(table.get("source") or "")), document, dict(table))


def _of_table(place: _Place, document: Mapping[str, Any], table: dict[str, Any]) -> Iterator[Published]:
    columns = _columns(place, table.pop("columns", None))
    rows = table.pop("rows", None)
    full, name = table.pop("full", None), table.pop("full_row", FULL)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{place.at('rows')}: the field rows is missing, a list of the table's rows.")
    if full is not None:
        alike = columns if isinstance(full, list) else [{}]  # one number for all columns is one entry
        yield from _of_row(place, [document, table], alike, {"row": name, "policy": FULL, "value": full})
        table.setdefault("full_elsewhere", full)
    for number, row in enumerate(rows):
        yield from _of_row(replace(place, row=number), [document, table], columns, row)


def _columns(place: _Place, given: Any) -> list[dict[str, Any]]:
    """The fields of each column; one column without any where the table names none."""
    if given is None:
        return [{}]
    lists = list(given.values()) if isinstance(given, dict) else []
    if not lists or not all(isinstance(items, list) and 0 < len(items) == len(lists[0]) for items in lists):
        raise UserError(f"{place.at('columns')}: columns is a mapping of fields to lists, all of one length.")
    return [dict(zip(given, items, strict=True)) for items in zip(*lists, strict=True)]


def _of_row(
    place: _Place, outer: Sequence[Mapping[str, Any]], columns: Sequence[Mapping[str, Any]], row: Mapping[str, Any]
) -> Iterator[Published]:
    row = dict(row)
    name = row.pop("row", None)
    place = replace(place, name=str(name or row.get("policy", "?")))
    for number, column in enumerate(columns):
        own = {key: _cell(place, key, value, number, len(columns)) for key, value in row.items()}
        above = [
            {key: _cell(place, key, value, number, len(columns)) for key, value in level.items()} for level in outer
        ]
        if own.get("value") is None and isinstance(row.get("value"), list):
            continue  # an empty cell
        given = _merged([*above, column, own])
        if name is not None and "source" in given:
            given["source"] = f"{given['source']}, row {name}"
        if given.get("policy") == FULL:
            given |= {"budget": None, "budget_meaning": "", "full_elsewhere": None, "trained": "none", "runs_as": ""}
        yield _checked(place, given)


def _cell(place: _Place, key: str, value: Any, number: int, columns: int) -> Any:
    if key not in OF_A_CELL or not isinstance(value, list):
        if key == "value" and columns > 1:
            raise UserError(f"{place.at(key)}: value has to be a list of {columns} numbers, one for each column.")
        return value
    if len(value) != columns:
        raise UserError(f"{place.at(key)}: {key} has {len(value)} items, and there are {columns} columns.")
    return value[number]


def _merged(levels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for level in levels:
        for key, value in level.items():
            if key == "protocol" and isinstance(value, dict) and isinstance(merged.get(key, {}), dict):
                merged[key] = {**merged.get(key, {}), **value}
            elif key == "note" and merged.get(key):
                merged[key] = f"{merged[key]} {value}"
            else:
                merged[key] = value
    return merged


def _checked(place: _Place, given: dict[str, Any]) -> Published:
    """An entry of these fields, or a UserError about one of them."""
    for name in given:
        if name not in KEYS:
            raise UserError(f"{place.at(name)}: the field {name} is unknown.")
    if given.get("budget", "") is None:
        given.setdefault("budget_meaning", "")
    given["full"] = given.pop("full_elsewhere", None)
    given = {**OPTIONAL, **_of_policy(place, given)}
    for field in fields(Published):
        if field.name not in given:
            raise UserError(f"{place.at()}: the field {field.name} is missing.")
    for name in TEXTS:
        optional = name in OPTIONAL and given[name] in ("", None)
        if not optional and (not isinstance(given[name], str) or not given[name]):
            raise UserError(f"{place.at(name)}: the field {name} has to be a text, not {given[name]!r}.")
    given["budget"] = _budget(place, given["budget"], given["budget_meaning"])
    for name, known in CHOICES.items():
        _check_choice(place, name, given[name], known)
    given["tasks"] = _tasks(place, given["tasks"])
    _check_protocol(place, given["protocol"])
    if given["repeats"] is not None and not (type(given["repeats"]) is int and given["repeats"] > 0):
        raise UserError(
            f"{place.at('repeats')}: the field repeats has to be a whole number above 0, not {given['repeats']!r}."
        )
    low, high = UNITS[given["unit"]]
    for name in ("value", "full"):
        given[name] = _number(place, name, given[name], low, high, given["unit"])
    given["spread"] = _number(place, "spread", given["spread"], 0, math.inf, given["unit"])
    given["retention"] = _number(place, "retention", given["retention"], 0, math.inf, "percent")
    if given["value"] is None:
        raise UserError(f"{place.at('value')}: the field value is empty.")
    return Published(**given)


def _of_policy(place: _Place, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with the value of this policy in place of a mapping from policies to values."""
    whole = dict(given)
    name = str(given.get("policy", "")).partition(":")[0]
    for field in BY_POLICY:
        if isinstance(values := given.get(field), dict):
            if name not in values and field not in OPTIONAL:
                raise UserError(f"{place.at(field)}: the field {field} does not name the policy {name}.")
            whole[field] = values.get(name, OPTIONAL.get(field))
    return whole


def _check_choice(place: _Place, field: str, value: Any, known: Iterable[str]) -> None:
    if value not in (names := list(known)):
        raise UserError(f"{place.at(field)}: {value!r} is no {field}; there are {', '.join(names)}.")


def _check_protocol(place: _Place, protocol: Any) -> None:
    if not isinstance(protocol, dict):
        raise UserError(f"{place.at('protocol')}: the field protocol has to be a mapping.")
    for name, value in protocol.items():
        _check_choice(place, "protocol", name, PROTOCOL)
        if not isinstance(value, (str, bool, int, float, NoneType)) or value != value:
            raise UserError(f"{place.at('protocol')}: {name} of the protocol has to be one value, not {value!r}.")


def _tasks(place: _Place, tasks: Any) -> tuple[str, ...]:
    names: list[Any] = list(tasks) if isinstance(tasks, (list, tuple)) else [None]
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise UserError(f"{place.at('tasks')}: the field tasks has to be a list of names, each once, not {tasks!r}.")
    return tuple(names)


def _budget(place: _Place, budget: Any, meaning: str) -> str | None:
    if budget is None:
        return None
    try:
        read = Budget.parse(str(budget))
    except UserError as error:
        raise UserError(f"{place.at('budget')}: the field budget is {budget!r}. {error}") from None
    if not meaning:
        raise UserError(f"{place.at()}: the field budget_meaning is missing.")
    return str(read)


def _number(place: _Place, field: str, value: Any, low: float, high: float, unit: str) -> float | None:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high:
        raise UserError(f"{place.at(field)}: the field {field} is {value!r}, which is no number of {unit}.")
    return float(value)
