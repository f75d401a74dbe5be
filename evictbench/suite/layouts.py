"""Where people keep the files of a data set: under which names, in a clone, a snapshot, or the hub's cache."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evictbench.suite.records import has_member


@dataclass(frozen=True)
class Layout:
    """Files that hold a data set together, in this order.

    paths: relative to a folder. A name may hold * for the parts of one table, and "data.zip/name" is inside an archive.
    signs: field to a pattern that its value in the first record matches. A name that does not say whose data it is
    ("test.jsonl") needs them in a folder that does not say it either.
    """

    paths: tuple[str, ...]
    signs: Mapping[str, str] = field(default_factory=dict)

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether a record has the signs."""
        return all(
            record.get(name) is not None and re.search(pattern, str(record[name]))
            for name, pattern in self.signs.items()
        )


@dataclass(frozen=True)
class File:
    """A file, or a member of an archive. name: its path under --data-dir, for results."""

    path: Path
    name: str
    member: str | None = None


@dataclass(frozen=True)
class Candidate:
    """Files that may hold a data set. sure: the folder or the names say whose they are."""

    layout: Layout
    files: tuple[File, ...]
    sure: bool


def candidates(
    data_dir: Path,
    layouts: Sequence[Layout],
    folders: Sequence[str],
    repositories: Sequence[str],
    revision: str | None = None,
) -> Iterator[Candidate]:
    """What `data_dir` has of the layouts, the likeliest first.

    folders: names of the data set's own folder, the first of them the usual one. repositories: ids on the hub, whose
    clones, downloads and caches are known by name. revision: the commit that is taken first where a cache has several.
    Files come first from the usual folder and from `data_dir` itself, and then from elsewhere; layouts of which a part
    is missing come last.
    """
    names = {*folders, *(part for id in repositories for part in (id.rpartition("/")[2], _cache_name(id)))}
    own = any(part in names for part in data_dir.absolute().parts[-3:])
    usual = [(data_dir / folders[0], True), (data_dir, own)]
    others = [(root, True) for root in _elsewhere(data_dir, folders[1:], repositories, revision)]
    incomplete = []
    for roots in (usual, others):
        for layout in layouts:
            for root, sure in roots:
                files = [_files(data_dir, root, path) for path in layout.paths]
                found = Candidate(layout, tuple(file for part in files for file in part), sure=sure or not layout.signs)
                if all(files):
                    yield found
                elif found.files:
                    incomplete.append(found)
    yield from incomplete


def _files(data_dir: Path, root: Path, path: str) -> list[File]:
    archive, is_archive, member = path.partition(".zip/")
    if is_archive:
        file = root / f"{archive}.zip"
        name = f"{file.relative_to(data_dir).as_posix()}/{member}"
        return [File(file, name, member)] if file.is_file() and has_member(file, member) else []
    matches = sorted(root.glob(path)) if "*" in path else [root / path]
    return [File(file, file.relative_to(data_dir).as_posix()) for file in matches if file.is_file()]


def _elsewhere(
    data_dir: Path, folders: Sequence[str], repositories: Sequence[str], revision: str | None
) -> Iterator[Path]:
    """Folders under other names, clones and downloads, and snapshots in a cache of the hub."""
    places = [*folders, *(name for id in repositories for name in (id.rpartition("/")[2], id))]
    yield from (data_dir / place for place in dict.fromkeys(places))
    here = data_dir.absolute()
    for id in repositories:
        name = _cache_name(id)
        caches = [data_dir / name / "snapshots", data_dir / "hub" / name / "snapshots"]
        if here.name == name:
            caches.append(data_dir / "snapshots")
        elif (here.parent.name, here.name) == (name, "snapshots"):
            caches.append(data_dir)
        for cache in caches:
            yield from _snapshots(cache, revision)


def _snapshots(cache: Path, revision: str | None) -> list[Path]:
    """The snapshots of a repository in the hub's cache: of `revision`, then of its main branch, then others by name."""
    snapshots = {path.name: path for path in sorted(cache.glob("*")) if path.is_dir()}
    main = cache.absolute().parent / "refs" / "main"
    first = [revision, main.read_text(encoding="utf-8", errors="replace").strip() if main.is_file() else None]
    order = [name for name in first if name in snapshots]
    return [snapshots[name] for name in dict.fromkeys([*order, *snapshots]) if name is not None]


def _cache_name(repository: str) -> str:
    return "datasets--" + repository.replace("/", "--")
