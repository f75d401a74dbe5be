"""The shards of a cell: folders of samples that several workers fill, and that are merged into the cell's own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from evictbench.store import run_folder

SHARDS = ".shards"
"""The folder in a cell's folder that holds its shards."""


def shard_folder(cell: Path, shard: int, shards: int) -> Path:
    """Where the samples of one shard (from 0) go; the cell's own folder where there is one shard."""
    return cell if shards == 1 else cell / SHARDS / f"{shard + 1}-of-{shards}"


def shard_folders(cell: Path) -> list[Path]:
    """The folders of a cell's shards that are not merged yet, whatever number of shards they were of."""
    return sorted(folder for folder in (cell / SHARDS).glob("*-of-*") if folder.is_dir())


def merge_shards(cell: Path, fingerprint: Mapping[str, Any]) -> int:
    """Merge those shards of a cell that nobody is writing to. Returns how many samples that added to the cell.

    Lines keep their session, which is copied with them. Raises `run_folder.Held` if another process writes to the cell.
    """
    for folder in shard_folders(cell):
        with suppress(OSError):  # only a shard that nobody has begun is empty
            folder.rmdir()
    folders = shard_folders(cell)
    added = 0
    if not folders:
        with suppress(OSError):
            (cell / SHARDS).rmdir()
        return 0
    with run_folder.open_run(cell, fingerprint) as whole:
        for folder in folders:
            with suppress(run_folder.Held), run_folder.open_run(folder, fingerprint) as shard:
                added += _add(whole, shard)
                shutil.rmtree(folder)
        if not shard_folders(cell):
            shutil.rmtree(cell / SHARDS, ignore_errors=True)
    return added


def _add(whole: run_folder.RunFolder, shard: run_folder.RunFolder) -> int:
    """Append a shard's new samples to its cell, session by session. Returns how many."""
    new = [line for key, line in shard.samples.items() if key not in whole.samples]
    for number, session in enumerate(shard.run["sessions"]):
        lines = [line for line in new if line["session"] == number]
        if lines:
            whole.start_session(session)
        for line in lines:
            whole.append(line)
    return len(new)
