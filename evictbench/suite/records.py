"""Records from a file: .jsonl, .json or .parquet, by itself or in a .zip archive, which is never unpacked."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, ZipFile

from evictbench.errors import UserError, first_line

Record = dict[str, Any]

LARGEST_MEMBER = 2 * 2**30
"""Bytes that a member of an archive may have when it is unpacked."""

_POINTER = b"version https://git-lfs"


def read(path: Path, member: str | None = None) -> list[Record]:
    """The records of a .jsonl, .json (a list, or an object with `examples` or `data`) or .parquet file.

    member: the file's name in the archive `path`; None where the path is the file itself.
    Raises UserError naming the file, and the line where there is one.
    """
    where = str(path) if member is None else f"{path}/{member}"
    reader = {".jsonl": _lines, ".json": _json, ".parquet": _parquet}.get(Path(member or path).suffix)
    if reader is None:
        raise UserError(f"{where} is neither .jsonl nor .json nor .parquet.")
    try:
        with _opened(path, member) as file:
            records = reader(file, where)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text (byte {error.start}).") from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise UserError(f"{where}: record {number} is {type(record).__name__}, not an object with fields.")
    return records


def has_member(archive: Path, member: str) -> bool:
    """Whether an archive has a member; True for one that cannot be opened, so that reading it says why."""
    try:
        with ZipFile(archive) as opened:
            return member in opened.namelist()
    except (OSError, BadZipFile):
        return True


@contextmanager
def _opened(path: Path, member: str | None) -> Iterator[BinaryIO]:
    """A file, or a member of the archive `path`, read into memory.

    Raises UserError for a pointer of Git LFS in place of the file, and for an archive or a member that cannot be read.
    """
    with path.open("rb") as file:
        if file.peek(len(_POINTER)).startswith(_POINTER):
            raise UserError(f"{path} is a pointer of Git LFS and not the file itself: fetch it with git lfs pull.")
        yield file if member is None else io.BytesIO(_member(path, file, member))


def _member(path: Path, file: BinaryIO, member: str) -> bytes:
    try:
        with ZipFile(file) as archive:
            if archive.getinfo(member).file_size > LARGEST_MEMBER:
                raise UserError(f"{path}/{member} has more than {LARGEST_MEMBER} bytes when it is unpacked.")
            return archive.read(member)
    except KeyError as error:
        raise UserError(f"{path} has no member {member}.") from error
    except (BadZipFile, RuntimeError, NotImplementedError, EOFError, ValueError, zlib.error) as error:
        why = first_line(error).rstrip(".")
        raise UserError(f"{path} is not a .zip archive that can be read: {why}.") from error


def _lines(file: BinaryIO, where: str) -> list[Any]:
    records = []
    for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8-sig"), start=1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: line {number} is not valid JSON: {first_line(error)}.") from error
    return records


def _json(file: BinaryIO, where: str) -> list[Any]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig").read()
    if not text.strip():
        return []
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON: {first_line(error)}.") from error
    if isinstance(loaded, dict):
        loaded = loaded.get("examples", loaded.get("data"))
    if not isinstance(loaded, list):
        raise UserError(f"{where} is neither a list of records nor an object with the list `examples` or `data`.")
    return loaded


def _parquet(file: BinaryIO, where: str) -> list[Any]:
    import pyarrow.parquet
    from pyarrow import ArrowException

    try:
        return list(pyarrow.parquet.read_table(file).to_pylist())
    except ArrowException as error:
        raise UserError(f"{where} is not a parquet file that can be read: {first_line(error).rstrip('.')}.") from error
