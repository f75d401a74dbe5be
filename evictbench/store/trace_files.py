"""The files of a trace: their columns and types, and reading them back.

    <folder>/trace.json         settings, versions, machine, its copy bandwidth in bytes/s, wall clock per cell (s)
    <folder>/trace.parquet      one row a step: `STEPS`
    <folder>/retention.parquet  one row per snapshot, layer and head, where retention was asked for: `RETENTION`

trace.json: `model`, `device`, `machine`, `commit`; `made_by`, which is the same for all cells (dtype, chunk, versions,
...); `copy_bandwidth` (read and written) and `read_weight_bytes`, what a decode step reads of the weights; `policies`,
by label, with their settings and weights; `cells`, one line each: `prefill_seconds` and `decode_seconds` are the wall
clock of the phases, `first_token_seconds` ends when the first token is known, `admit_seconds` copies what the prompt
left to every row, `<phase>_peak_bytes` is the most memory in use, `wall_seconds` all of the cell, warming up included.

A cell is one policy at one budget, context and number of rows. Times are in milliseconds, sizes in bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from evictbench.errors import UserError
from evictbench.store.files import open_file
from evictbench.store.records import CHECKSUM, LARGEST, Trace, checked, read_object

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


TRACE, STEPS_FILE, RETENTION_FILE = "trace.json", "trace.parquet", "retention.parquet"

MADE_BY = "made_by"
"""The key of trace.json for what is the same in all of its cells."""

PREFILL, DECODE = "prefill", "decode"
OK, OUT_OF_MEMORY = "ok", "out of memory"


class Column(NamedTuple):
    """A column: its name, the name of its Arrow type (`list<int32>` for lists), and what it holds.

    least: the smallest number that it may hold. words: the texts that it may hold, all where empty. null: "never",
    "lost" (in rows of cells that ran out of memory), or "always".
    """

    name: str
    type: str
    meaning: str
    least: float = 0
    words: tuple[str, ...] = ()
    null: str = "never"


STEPS = (
    Column("cell", "int32", "number of the cell, from 0 in the order in which cells ran"),
    Column("policy", "string", "the policy with the settings that differ from its defaults, as --policy takes it"),
    Column("budget", "string", "the budget as given (512, 25%); null for a policy without one", null="always"),
    Column("context", "int64", "tokens of the prompt", least=1),
    Column("rows", "int32", "rows decoded together", least=1),
    Column("phase", "string", "prefill or decode", words=(PREFILL, DECODE)),
    Column("step", "int64", "number of the forward pass within its cell and phase, from 0"),
    Column("position", "int64", "tokens seen by a row after the step"),
    Column("ms", "float64", "milliseconds of the whole step", null="lost"),
    Column("attention_ms", "float64", "of these, attention, with what its own softmax shows a policy", null="lost"),
    Column("signals_ms", "float64", "of these, what else the policy asked to see", null="lost"),
    Column("policy_ms", "float64", "of these, keeping the cache: writing entries, scoring, evicting", null="lost"),
    Column("rest_ms", "float64", "of these, all else: ms less the three before", least=-LARGEST, null="lost"),
    Column("entries_max", "int64", "most entries that a KV head holds after the step", null="lost"),
    Column("entries_mean", "float64", "the mean over rows, layers and KV heads", null="lost"),
    Column("cache_bytes", "int64", "bytes that the cache holds after the step, policy state included", null="lost"),
    Column(
        "allocated_bytes",
        "int64",
        "bytes of device memory allocated; on a CPU, of process memory resident",
        null="lost",
    ),
    Column("reserved_bytes", "int64", "bytes of device memory reserved; on a CPU, the same as allocated", null="lost"),
    Column("status", "string", "ok, or out of memory: such a row's measurements are null", words=(OK, OUT_OF_MEMORY)),
)
"""The columns of `trace.parquet`."""

RETENTION = (
    Column("cell", "int32", "the cell, as in trace.parquet"),
    Column("policy", "string", "as in trace.parquet"),
    Column("budget", "string", "as in trace.parquet", null="always"),
    Column("seen", "int64", "tokens seen when the cache was looked at", least=1),
    Column("layer", "int32", "layer, from 0"),
    Column("head", "int32", "KV head, from 0"),
    Column("positions", "list<int32>", "positions of the tokens that the head held then, ascending"),
)
"""The columns of `retention.parquet`."""


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """`columns` as an Arrow schema, each column's meaning in its metadata."""
    import pyarrow as pa

    def kind(name: str) -> pa.DataType:
        inner = name.removeprefix("list<").removesuffix(">")
        return pa.list_(kind(inner)) if inner != name else getattr(pa, name)()

    return pa.schema(
        [pa.field(column.name, kind(column.type), metadata={"meaning": column.meaning}) for column in columns]
    )


def is_trace(folder: Path) -> bool:
    """Whether a folder holds a trace, finished or not."""
    return (folder / TRACE).is_file() or (folder / STEPS_FILE).is_file()


def read_about(folder: Path) -> dict[str, Any]:
    """What trace.json says, checked. Raises UserError."""
    file = folder / TRACE
    try:
        about = read_object(file)
        checked(about, Trace)
    except (UserError, ValueError) as error:
        why = str(error).rstrip(".")
        raise UserError(f"{file} is not the record of a trace ({why}): run evictbench trace again.") from None
    return about


def read_trace(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """The settings and the steps of a trace; UserError where they are not those of one."""
    about = read_about(folder)
    file = folder / STEPS_FILE
    if not file.exists():
        raise UserError(f"There is no {file}: the trace was not finished.")
    return about, read_table(file, STEPS).to_pandas()


def read_retention(folder: Path) -> pd.DataFrame | None:
    """The positions that each head kept, snapshot by snapshot; None where the trace was not asked for them."""
    import numpy as np

    file = folder / RETENTION_FILE
    if not file.exists():
        return None
    frame = read_table(file, RETENTION).to_pandas()
    for number, (seen, positions) in enumerate(zip(frame["seen"], frame["positions"], strict=True)):
        held = np.asarray(positions)
        if len(held) and not (held[0] >= 0 and held[-1] < seen and (np.diff(held) > 0).all()):
            raise _damaged(file, f"row {number + 1}: positions are from 0 to seen - 1, ascending")
    return frame


def write_table(table: pa.Table, file: Path) -> None:
    """Write a table of a trace, with checksums of its pages and of its contents."""
    import pyarrow.parquet as pq

    table = table.replace_schema_metadata({CHECKSUM: contents_crc32(table)})
    pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def contents_crc32(table: pa.Table) -> str:
    """The CRC-32 of a table's names and values, eight hex digits. Pages have checksums, a file's footer has none."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    crc = 0

    def add(data: bytes) -> None:
        nonlocal crc
        crc = zlib.crc32(data, crc)

    for name in table.column_names:
        values = table[name].combine_chunks()
        add(name.encode())
        add(np.asarray(pc.is_null(values), dtype=np.uint8).tobytes())
        if pa.types.is_list(values.type):
            add(np.asarray(pc.fill_null(pc.list_value_length(values), 0), dtype="<i8").tobytes())
            values = pc.list_flatten(values)
        if pa.types.is_string(values.type):
            add("\0".join(pc.fill_null(values, "").to_pylist()).encode())
        else:
            add(np.asarray(pc.fill_null(values, 0), dtype="<f8").tobytes())
    return f"{crc:08x}"


def read_table(file: Path, columns: tuple[Column, ...]) -> pa.Table:
    """The table in a file of a trace, each column checked. Raises UserError with the file, the column and the row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_file(file) as stream:
            table = pq.read_table(stream, page_checksum_verification=True)
        stated = (table.schema.metadata or {}).get(CHECKSUM.encode())
        if stated is not None and stated != contents_crc32(table).encode():
            raise ValueError("its contents are not those that were written")
        missing = [column.name for column in columns if column.name not in table.column_names]
        if missing:
            raise UserError(f"{file} has no column {missing[0]}: it was written by another version.")
        names = [column.name for column in columns]
        table = table.select(names).cast(arrow_schema(columns))
        table.validate(full=True)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{file} is half-written or damaged: run evictbench trace again.") from error
    for column in columns:
        row = _first_wrong(table, column)
        if row is not None:
            raise _damaged(file, f"row {row + 1}: {column.name} is {table[column.name][row]}")
    return table


def _first_wrong(table: pa.Table, column: Column) -> int | None:
    """The first row in which a column holds what it cannot hold."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = table[column.name]
    wrong = pc.is_null(values)
    if column.null == "always":
        wrong = pc.and_(wrong, False)
    elif column.null == "lost":
        wrong = pc.and_(wrong, pc.equal(table["status"], OK))
    if pa.types.is_list(values.type):
        values = pc.list_value_length(values)  # what is in the lists has rules of its own
    if pa.types.is_string(values.type):
        possible = pc.is_in(values, pa.array(column.words)) if column.words else pc.not_equal(values, "")
    else:
        possible = pc.and_(pc.greater_equal(values, column.least), pc.less_equal(values, LARGEST))
    wrong = pc.or_(wrong, pc.invert(pc.fill_null(possible, True)))
    row = pc.index(wrong, True).as_py()
    return None if row < 0 else int(row)


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"{file} is damaged ({why}): run evictbench trace again.")
