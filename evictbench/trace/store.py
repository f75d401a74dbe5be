"""The folder of a trace as it grows: after each cell all of its files are replaced, so that what is there is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.store.files import check_writable, locked, replacing, write_json
from evictbench.store.trace_files import (
    MADE_BY,
    RETENTION,
    RETENTION_FILE,
    STEPS,
    STEPS_FILE,
    TRACE,
    Column,
    arrow_schema,
    read_about,
    read_table,
    write_table,
)

if TYPE_CHECKING:
    import pyarrow as pa


def check_folder(path: Path) -> None:
    """Raise UserError unless a folder can hold a trace: new, empty, or holding one."""
    check_writable(path, "A trace", "a trace needs")
    if not path.is_dir():
        return
    if (path / TRACE).exists():
        _about(path)
        return
    foreign = sorted(file.name for file in path.iterdir() if file.name[0] != ".")
    if foreign:
        raise UserError(f"{path} is not the folder of a trace (it holds {foreign[0]}): name another with --out.")


class TraceFolder:
    """The folder, held for writing; made by `opened`. about: what trace.json says, "cells" with a line for each."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.about = about
        cells = {int(cell["cell"]) for cell in about["cells"]}
        self._steps = _table(path / STEPS_FILE, STEPS, cells)
        self._snapshots = _table(path / RETENTION_FILE, RETENTION, cells)

    @property
    def cells(self) -> list[dict[str, Any]]:
        """The finished cells."""
        cells: list[dict[str, Any]] = self.about["cells"]
        return cells

    def add(
        self, cell: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], snapshots: Sequence[Mapping[str, Any]]
    ) -> None:
        """A finished cell: its line of trace.json, its rows of trace.parquet, and of retention.parquet if any.

        trace.json comes last: rows of a cell that it does not name are left out by whoever opens the folder again.
        """
        import pyarrow as pa

        self._steps = pa.concat_tables([self._steps, _rows(steps, STEPS)])
        _write(self._steps, self.path / STEPS_FILE)
        if snapshots:
            self._snapshots = pa.concat_tables([self._snapshots, _rows(snapshots, RETENTION)])
            _write(self._snapshots, self.path / RETENTION_FILE)
        self.cells.append(dict(cell))
        write_json(self.path / TRACE, self.about)


def read_finished(path: Path, made_by: Mapping[str, Any]) -> dict[str, Any] | None:
    """The description of the trace in a folder; None if there is none. Raises UserError if `made_by` is another."""
    if not (path / TRACE).exists():
        return None
    about = _about(path)
    _check_same(path, about[MADE_BY], made_by)
    return about


@contextmanager
def opened(path: Path, about: Mapping[str, Any]) -> Iterator[TraceFolder]:
    """Hold a trace's folder, made if need be, with the cells that it has; `about` is new in all but the cells.

    Raises UserError if another process holds it, or if it was made by something else.
    """
    held = UserError(f"Another trace is being written to {path}: wait for it to end, or stop it.")
    with locked(path, "A trace", held):
        whole: dict[str, Any] = {**about, "cells": []}
        if (path / TRACE).exists():
            before = _about(path)
            _check_same(path, before[MADE_BY], about[MADE_BY])
            policies = {**before.get("policies", {}), **about.get("policies", {})}
            whole = {**before, **about, "cells": before["cells"], "policies": policies}
        yield TraceFolder(path, whole)


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if before.get(name) != value:
            raise UserError(
                f"The trace in {path} was made with {name} {json.dumps(before.get(name))}, and this one has "
                f"{json.dumps(value)}: name another folder with --out."
            )


def _about(path: Path) -> dict[str, Any]:
    try:
        about = read_about(path)
    except UserError as error:
        raise UserError(str(error).replace("run evictbench trace again", "name another folder with --out")) from None
    if MADE_BY not in about or "cells" not in about:
        raise UserError(f"{path / TRACE} is not the record of a trace: name another folder with --out.")
    return about


def _table(file: Path, columns: tuple[Column, ...], cells: set[int]) -> pa.Table:
    """The rows of a file that belong to these cells; an empty table if there is no file."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not file.exists():
        return arrow_schema(columns).empty_table()
    table = read_table(file, columns)
    return table.filter(pc.is_in(table["cell"], pa.array(sorted(cells), pa.int32())))


def _rows(rows: Sequence[Mapping[str, Any]], columns: tuple[Column, ...]) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_pylist([dict(row) for row in rows], schema=arrow_schema(columns))


def _write(table: pa.Table, file: Path) -> None:
    """Replace a file at once."""
    with replacing(file) as unfinished:
        write_table(table, unfinished)
