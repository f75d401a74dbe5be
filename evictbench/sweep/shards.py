"""The shards of a cell: folders of samples that several workers fill, and that are merged into the cell's own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from evictbench.store import run_folder
from evictbench.store.files import read_lines
from evictbench.store.records import is_json, parse_sample

SHARDS = ".shards"
"""The folder in a cell's folder that holds its shards."""

MERGED = ".merged-"
"""The beginning of a shard's name while it is removed."""


def shard_folder(cell: Path, shard: int, shards: int) -> Path:
    """Where the samples of one shard (from 0) go; the cell's own folder where there is one shard."""
    return cell if shards == 1 else cell / SHARDS / f"{shard + 1}-of-{shards}"


def shard_folders(cell: Path) -> list[Path]:
    """The folders of a cell's shards that are not merged yet, whatever number of shards they were of."""
    return sorted(folder for folder in (cell / SHARDS).glob("*-of-*") if folder.is_dir())


def finished_samples(cell: Path) -> dict[run_folder.Key, dict[str, Any]]:
    """The samples of a cell and of its shards. Raises UserError for a damaged folder."""
    samples = run_folder.read_samples(cell)
    for folder in shard_folders(cell):
        if (folder / run_folder.RUN).exists():
            samples = {**run_folder.read_samples(folder), **samples}
    return samples


def merge_shards(cell: Path, fingerprint: Mapping[str, Any]) -> int:
    """Merge those shards of a cell that nobody is writing to. Returns how many samples that added to the cell.

    Lines keep their session, which is copied with them. A merge that is killed is gone on with by the next one. Raises
    `run_folder.Held` if another process writes to the cell.
    """
    for left in (cell / SHARDS).glob(f"{MERGED}*"):
        shutil.rmtree(left, ignore_errors=True)
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
            if _was_merged(folder, whole):
                _remove(folder)
                continue
            with suppress(run_folder.Held), run_folder.open_run(folder, fingerprint) as shard:
                added += _add(whole, shard)
                _remove(folder)
        if not shard_folders(cell):
            shutil.rmtree(cell / SHARDS, ignore_errors=True)
    return added


def _remove(shard: Path) -> None:
    """Remove a merged shard. It has another name while its files go, so that half of it is never taken for a shard."""
    gone = shard.with_name(f"{MERGED}{shard.name.partition('-')[0]}")
    shard.rename(gone)
    shutil.rmtree(gone)


def _was_merged(shard: Path, whole: run_folder.RunFolder) -> bool:
    """Whether a shard without its run.json is what an earlier version left of one: its samples are in the cell."""
    if (shard / run_folder.RUN).exists() or not (shard / run_folder.SAMPLES).exists():
        return False
    parse = partial(parse_sample, fingerprint=whole.run["fingerprint"])
    lines, _ = read_lines(shard / run_folder.SAMPLES, parse, is_json)
    return {run_folder.key_of(line) for line in lines} <= whole.samples.keys()


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
