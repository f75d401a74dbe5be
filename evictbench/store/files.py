"""Files that are whole or not there, their hashes, and folders that one process writes to at a time."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from evictbench.errors import UserError

LOCK = ".lock"
"""The file in a folder that a process locks to write to it."""

LONGEST_LINE = 16_000_000
"""Bytes of the longest line that is read; the longest that a run writes has some two million."""

Parsed = TypeVar("Parsed")


@contextmanager
def locked(folder: Path, subject: str, held: UserError) -> Iterator[None]:
    """Make a folder if need be, lock it, and remove what a killed process left unfinished in it.

    subject: what is written to the folder, as the beginning of a sentence ("Results"). held: the error to raise if
    another process has the lock. Raises UserError if the folder cannot be written to.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise held from None
    except OSError as error:
        raise UserError(f"{subject} cannot be written to {folder}: {error.strerror or error}.") from error
    try:
        for file in unfinished_files(folder):
            file.unlink()
        yield
    finally:
        lock.release()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary file beside `path` to write to, and put it in the place of `path` at the end.

    Readers see the old file or the new one, whole. After an error the old file stays as it was.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-unfinished-", dir=path.parent)
    try:
        os.close(handle)
        yield Path(name)
        with open(name, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def unfinished_files(folder: Path) -> list[Path]:
    """The temporary files that killed processes left in a folder, those with an earlier version's names included."""
    return sorted({*folder.glob(".*-unfinished-*"), *folder.glob(".*.json-*")})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file at once."""
    with replacing(path) as file, file.open("w") as out:
        json.dump(content, out, indent=2, ensure_ascii=False, allow_nan=False)
        out.write("\n")


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file in one write; it is on the disk when this returns. OSError if only part of it fits."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        end = os.fstat(file).st_size
        if os.write(file, line) != len(line):
            os.ftruncate(file, end)
            raise OSError(f"the disk took only part of a line: {path}")
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading. Raises UserError for a folder, a pipe, and what cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} cannot be read: it is not a file.")
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_lines(
    path: Path, parse: Callable[[bytes], Parsed], whole: Callable[[bytes], bool] = lambda _: False
) -> tuple[list[Parsed], int]:
    """The parsed lines of a file without a torn last one, and how many bytes of the file they are.

    A file that does not exist has no lines. parse: reads one line, and raises ValueError, TypeError or KeyError for a
    damaged one. whole: whether a line that does not parse was written to its end, so that it is not torn. Raises
    UserError that names a damaged line, or one of more than `LONGEST_LINE` bytes.
    """
    parsed: list[Parsed] = []
    size = 0
    for number, line, last in _numbered_lines(path):
        try:
            content = parse(line)
        except (ValueError, TypeError, KeyError) as error:
            if last and not (line.endswith(b"\n") and whole(line)):
                break
            why = f" ({error})" if isinstance(error, ValueError) else ""
            raise UserError(
                f"Line {number} of {path} is damaged{why}: remove that line to go on with the rest."
            ) from None
        if last and not line.endswith(b"\n"):
            break
        parsed.append(content)
        size += len(line)
    return parsed, size


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Each line with its number from 1, and whether it is the last."""
    if not os.path.lexists(path):
        return
    with open_file(path) as stream:
        line = stream.readline(LONGEST_LINE + 1)
        for number in itertools.count(1):
            if not line:
                return
            if len(line) > LONGEST_LINE:
                raise UserError(
                    f"Line {number} of {path} is longer than {LONGEST_LINE:,} bytes: no run writes such a line."
                )
            following = stream.readline(LONGEST_LINE + 1)
            yield number, line, not following
            line = following


def cut_to(path: Path, size: int) -> None:
    """Shorten a file to so many bytes; a file that is no longer, or does not exist, is left alone."""
    if path.exists() and size < path.stat().st_size:
        os.truncate(path, size)


def visible_files(folder: Path, name: str) -> list[Path]:
    """The files of that name in a folder and below it, sorted, but for those in hidden folders: they are unfinished."""
    files = sorted(folder.rglob(name))
    return [file for file in files if not any(part[0] == "." for part in file.relative_to(folder).parts)]


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def check_writable(folder: Path, subject: str, needs: str) -> None:
    """Raise UserError unless a folder can be written to or made.

    subject, needs: the beginnings of the two sentences: "Results" (cannot be written to), "results need" (a folder).
    """
    parent = existing_parent(folder)
    if not parent.is_dir():
        raise UserError(f"{parent} is a file; {needs} a folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{subject} cannot be written to {folder}: no permission in {parent}.")


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
