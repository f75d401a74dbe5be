"""Files that are whole or not there, their hashes, and folders that one process writes to at a time."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from evictbench.errors import UserError, WriteFailed, first_line

LOCK = ".lock"
"""The file in a folder that a process locks to write to it."""

LONGEST_LINE = 16_000_000
"""Bytes of the longest line that is read; the longest that a run writes has some two million."""

LONGEST_PATH = 4096 - 512
"""Bytes of a folder's path that leave room for the names below it, where a system takes 4,096."""

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

    For the files of a results folder: a link is replaced itself, so that no folder decides what else is written.
    Readers see the old file or the new one, whole. After an error the old file stays as it was. Raises WriteFailed
    where the system does not take the file.
    """
    name = ""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-unfinished-", dir=path.parent)
        os.close(handle)
        yield Path(name)
        with open(name, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        if name:
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise not_written(path, error) from error
        raise


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Give a temporary file to write to, and make its content that of `path` at the end.

    For a file that the user names. A regular file is replaced at once, and a new one is made, with its folder. A link
    stays, and the file that it leads to is replaced. To a device, a named pipe or an open file (/dev/stdout) the
    content is written through. Raises WriteFailed where that fails; the old file then stays as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        through = _written_through(path)
        target = path if through else Path(os.path.realpath(path))
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() and not through else None
    except OSError as error:
        raise not_written(path, error) from error
    if not through:
        with replacing(target) as file:
            yield file
        if mode is not None:
            target.chmod(mode)
        return
    with tempfile.TemporaryDirectory() as folder:
        unfinished = Path(folder) / "unfinished"
        yield unfinished
        try:
            with unfinished.open("rb") as content, path.open("wb") as out:
                shutil.copyfileobj(content, out)
        except OSError as error:
            raise not_written(path, error) from error


def unfinished_files(folder: Path) -> list[Path]:
    """The temporary files that killed processes left in a folder, those with an earlier version's names included."""
    return sorted({*folder.glob(".*-unfinished-*"), *folder.glob(".*.json-*")})


def not_written(path: Path, error: OSError) -> WriteFailed:
    """The error for a file that the system would not write."""
    return WriteFailed(f"{path} cannot be written: {error.strerror or error}.")


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turn what a library raises while it writes `path` into WriteFailed: torch's and safetensors' errors of a full
    disk are no OSErrors."""
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error
    except Exception as error:
        raise WriteFailed(f"{path} cannot be written: {first_line(error).rstrip('.')}.") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file at once."""
    with replacing(path) as file, file.open("w", encoding="utf-8") as out:
        json.dump(content, out, indent=2, ensure_ascii=False, allow_nan=False)
        out.write("\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file that the user names: see `writing`."""
    with writing(path) as file:
        file.write_text(text, encoding="utf-8", errors="replace")


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file in one write; it is on the disk when this returns. WriteFailed if not all of it fits; the
    file is then as it was. A link is not followed: no results folder decides what else is written."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except OSError as error:
        raise not_written(path, error) from error
    try:
        end = os.fstat(file).st_size
        if os.write(file, line) != len(line):
            os.ftruncate(file, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
    except OSError as error:
        raise not_written(path, error) from error
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
    return next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))


def check_writable(folder: Path, subject: str, needs: str) -> None:
    """Raise UserError unless a folder can be written to or made.

    subject, needs: the beginnings of the two sentences: "Results" (cannot be written to), "results need" (a folder).
    """
    _check_text(folder, subject)
    try:
        parent = existing_parent(folder)
        is_folder = stat.S_ISDIR(parent.stat().st_mode)
        _check_names(folder, parent)
    except OSError as error:
        raise UserError(f"{subject} cannot be written to {shortened(folder)}: {error.strerror or error}.") from error
    if not is_folder:
        raise UserError(f"{parent} is a file; {needs} a folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{subject} cannot be written to {folder}: no permission in {parent}.")


def check_file(file: Path, subject: str) -> None:
    """Raise UserError unless a file that the user names can be written, before the work for it begins.

    subject: the beginning of a sentence: "The report" (cannot be written to).
    """
    _check_text(file, subject)
    try:
        if file.is_dir():
            raise UserError(f"{file} is a folder, and {subject[0].lower()}{subject[1:]} is a file.")
        if _written_through(file):
            if not os.access(file, os.W_OK):
                raise UserError(f"{subject} cannot be written to {file}: no permission.")
            return
        target = Path(os.path.realpath(file))
        target.exists()  # raises what keeps it from being there, such as too long a name
    except OSError as error:
        raise UserError(f"{subject} cannot be written to {shortened(file)}: {error.strerror or error}.") from error
    check_writable(target.parent, subject, f"{subject[0].lower()}{subject[1:]} needs")


def is_text(name: str) -> bool:
    """Whether a name can be written to a file of results: file names may hold bytes that are no UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def shortened(path: Path) -> str:
    """A path for a sentence: of one too long for any disk, both ends."""
    text = str(path)
    return text if len(text) <= 300 else f"{text[:100]}…{text[-100:]}"


def _check_text(path: Path, subject: str) -> None:
    if not is_text(str(path)) or "\0" in str(path):
        raise UserError(f"{subject} cannot be written to {str(path)!r}: the name is not UTF-8 text.")


def _check_names(folder: Path, parent: Path) -> None:
    """Raise OSError if a name below `parent` is too long for its disk."""
    limit = os.pathconf(parent, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    names = folder.absolute().parts[len(parent.absolute().parts) :]
    if any(len(os.fsencode(name)) > limit for name in names):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    if sum(len(os.fsencode(name)) + 1 for name in folder.absolute().parts) > LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))


def _written_through(path: Path) -> bool:
    """Whether a path leads to what cannot be replaced by a file: a device, a pipe, or a file that is open already."""
    if any(Path(os.path.abspath(path)).is_relative_to(root) for root in ("/dev", "/proc")):
        return os.path.lexists(path)
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
