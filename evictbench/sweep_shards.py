"""A cell in shards: each shard is a small run folder inside the cell's, merged into it sample by sample.

Hidden inside the cell's folder, shards are no runs of their own to whoever reads results. Merging takes the locks of
both, adds what the cell does not have yet, and removes the shard; so it may be stopped anywhere, and done again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from evictbench import records

SHARDS = ".shards"


def shard_folder(cell: Path, shard: int, shards: int) -> Path:
    """Where the samples of one shard (from 0) go; the cell's own folder where there is one shard."""
    return cell if shards == 1 else cell / SHARDS / f"{shard + 1}-of-{shards}"


def shard_folders(cell: Path) -> list[Path]:
    """The shards of a cell that are not merged yet, whatever number of shards they were of."""
    return sorted(folder for folder in (cell / SHARDS).glob("*-of-*") if folder.is_dir())


def merge(cell: Path, identity: Mapping[str, Any]) -> int:
    """Merge the shards of a cell that nobody is writing to; how many samples that added.

    Lines keep their session, which moves with them. Raises `records.Held` if another process writes to the cell.
    """
    for folder in shard_folders(cell):
        with suppress(OSError):  # only those that nobody has begun are empty
            folder.rmdir()
    found = shard_folders(cell)
    added = 0
    if not found:
        with suppress(OSError):
            (cell / SHARDS).rmdir()
        return 0
    with records.open_run(cell, identity) as whole:
        for folder in found:
            with suppress(records.Held), records.open_run(folder, identity) as part:
                added += _add(whole, part)
                shutil.rmtree(folder)
        if not shard_folders(cell):
            shutil.rmtree(cell / SHARDS, ignore_errors=True)
    return added


def _add(whole: records.RunFolder, part: records.RunFolder) -> int:
    new = [line for key, line in part.samples.items() if key not in whole.samples]
    for number, session in enumerate(part.run["sessions"]):
        lines = [line for line in new if line["session"] == number]
        if lines:
            whole.start_session(session)
        for line in lines:
            whole.append(line)
    return len(new)
