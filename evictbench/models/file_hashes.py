"""Hashes of large files, read once and remembered until the file is another."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path

from evictbench.models.cache_folder import cache_folder
from evictbench.store.files import file_sha256

_remembered: dict[str, str] = {}


def remembered_sha256(file: Path) -> str:
    """The sha256 of a file, in hexadecimal.

    It is remembered in this process and in the cache folder, under the file's place, size, and times of change. A cache
    folder that cannot be read or written is done without.
    """
    key = _state(file)
    if key in _remembered:
        return _remembered[key]
    note = cache_folder() / "hashes" / key
    with contextlib.suppress(OSError, ValueError):
        sha256 = note.read_text()
        if re.fullmatch("[0-9a-f]{64}", sha256):
            _remembered[key] = sha256
            return sha256
    sha256 = file_sha256(file)
    if _state(file) == key:  # else it was changed while it was read
        _remembered[key] = sha256
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(sha256)
    return sha256


def _state(file: Path) -> str:
    """A name for a file as it is now. The time of change of its inode cannot be set back, that of its content can."""
    state = file.stat()
    parts = (file.resolve(), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return hashlib.sha256(" ".join(map(str, parts)).encode(errors="surrogateescape")).hexdigest()
