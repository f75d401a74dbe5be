"""A file of a trace gives the numbers that were written, or a sentence."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plot.plot_records import steps, write_trace

from evictbench.errors import UserError
from evictbench.store.trace_files import (
    RETENTION,
    STEPS,
    STEPS_FILE,
    arrow_schema,
    contents_crc32,
    read_table,
    read_trace,
)


def table(**changes):
    frame = steps()
    return pa.Table.from_pandas(frame.assign(**changes), schema=arrow_schema(STEPS), preserve_index=False)


def test_the_checksum_is_of_names_and_values():
    whole = contents_crc32(table())
    assert contents_crc32(table()) == whole
    changes = ({"ms": 7.0}, {"budget": "63"}, {"policy": None}, {"status": "out of memory"}, {"entries_max": None})
    changed = {contents_crc32(table(**change)) for change in changes}
    renamed = contents_crc32(table().rename_columns([*table().column_names[:-1], "state"]))
    assert len({whole, renamed, *changed}) == 2 + len(changes)
    held = [pa.Table.from_pylist([_kept(*positions)], schema=arrow_schema(RETENTION)) for positions in ((1, 2), (1, 3))]
    assert len({contents_crc32(one) for one in held}) == 2


def _kept(*positions):
    row = {"cell": 0, "policy": "h2o", "budget": "64", "seen": 9, "layer": 0, "head": 0}
    return row | {"positions": list(positions)}


def test_other_numbers_under_an_old_checksum_are_refused(tmp_path):
    write_trace(tmp_path / "t", steps())
    file = tmp_path / "t" / STEPS_FILE
    was = pq.read_table(file)
    pq.write_table(was.set_column(was.column_names.index("ms"), "ms", pa.array([1.0] * len(was))), file)
    with pytest.raises(UserError, match=r"trace\.parquet is half-written or damaged"):
        read_table(file, STEPS)


def test_a_trace_of_before_has_no_checksum_and_is_read(tmp_path):
    write_trace(tmp_path / "t", steps())
    file = tmp_path / "t" / STEPS_FILE
    before = read_table(file, STEPS)
    pq.write_table(pq.read_table(file).replace_schema_metadata(None), file)
    assert read_table(file, STEPS).equals(before)
    assert len(read_trace(tmp_path / "t")[1]) == len(before)
