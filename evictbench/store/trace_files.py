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

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from evictbench.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


TRACE, STEPS_FILE, RETENTION_FILE = "trace.json", "trace.parquet", "retention.parquet"

MADE_BY = "made_by"
"""The key of trace.json for what is the same in all of its cells."""

PREFILL, DECODE = "prefill", "decode"
OK, OUT_OF_MEMORY = "ok", "out of memory"


MADE_BY = "made_by"
"""The key of trace.json that says under what the trace was made: the same for all of its cells."""


class Column(NamedTuple):
    """A column: its name, the name of its Arrow type (`list<int32>` for lists), and what it holds."""

    name: str
    type: str
    meaning: str


STEPS = (
    Column("cell", "int32", "number of the cell, from 0 in the order in which cells ran"),
    Column("policy", "string", "the policy with the settings that differ from its defaults, as --policy takes it"),
    Column("budget", "string", "the budget as given (512, 25%); null for a policy without one"),
    Column("context", "int64", "tokens of the prompt"),
    Column("rows", "int32", "rows decoded together"),
    Column("phase", "string", "prefill or decode"),
    Column("step", "int64", "number of the forward pass within its cell and phase, from 0"),
    Column("position", "int64", "tokens seen by a row after the step"),
    Column("ms", "float64", "milliseconds of the whole step"),
    Column("attention_ms", "float64", "of these, attention, with what its own softmax shows a policy"),
    Column("signals_ms", "float64", "of these, what else the policy asked to see"),
    Column("policy_ms", "float64", "of these, keeping the cache: writing entries, scoring, evicting"),
    Column("rest_ms", "float64", "of these, all else: ms less the three before"),
    Column("entries_max", "int64", "most entries that a KV head holds after the step"),
    Column("entries_mean", "float64", "the mean over rows, layers and KV heads"),
    Column("cache_bytes", "int64", "bytes that the cache holds after the step, policy state included"),
    Column("allocated_bytes", "int64", "bytes of device memory allocated; on a CPU, of process memory resident"),
    Column("reserved_bytes", "int64", "bytes of device memory reserved; on a CPU, the same as allocated"),
    Column("status", "string", "ok, or out of memory: such a row's measurements are null"),
)
"""The columns of `trace.parquet`."""

RETENTION = (
    Column("cell", "int32", "the cell, as in trace.parquet"),
    Column("policy", "string", "as in trace.parquet"),
    Column("budget", "string", "as in trace.parquet"),
    Column("seen", "int64", "tokens seen when the cache was looked at"),
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


def read_trace(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """The settings and the steps of a trace; UserError where they are not those of one."""
    try:
        about = json.loads((folder / TRACE).read_text())
    except (OSError, ValueError):
        raise UserError(f"{folder / TRACE} is not the record of a trace: run evictbench trace again.") from None
    if not isinstance(about, dict):
        raise UserError(f"{folder / TRACE} is not the record of a trace: run evictbench trace again.")
    return about, _read(folder / STEPS_FILE, STEPS)


def read_retention(folder: Path) -> pd.DataFrame | None:
    """The positions that each head kept, snapshot by snapshot; None where the trace was not asked for them."""
    file = folder / RETENTION_FILE
    return _read(file, RETENTION) if file.exists() else None


def _read(file: Path, columns: tuple[Column, ...]) -> pd.DataFrame:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except FileNotFoundError:
        raise UserError(f"There is no {file}: the trace was not finished.") from None
    except (OSError, pa.ArrowInvalid):
        raise UserError(f"{file} is half-written or damaged: run evictbench trace again.") from None
    missing = [column.name for column in columns if column.name not in table.column_names]
    if missing:
        raise UserError(f"{file} has no column {missing[0]}: it was written by another version.")
    return table.to_pandas()
