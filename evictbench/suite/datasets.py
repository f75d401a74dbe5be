"""Benchmark records from a folder of the user or from the hub, checked and hashed, and the documents made of them."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from evictbench import hub
from evictbench.errors import UserError, first_line
from evictbench.suite.layouts import Layout, candidates
from evictbench.suite.records import Record, has_member, read

__all__ = [
    "Dataset",
    "Documents",
    "Layout",
    "Loaded",
    "Record",
    "Unavailable",
    "content_hash",
    "incomplete",
    "load",
    "place",
    "read",
]

NAMED = 4
"""File names that a sentence about missing data has at most."""


@dataclass(frozen=True)
class Dataset:
    """Where the records of one benchmark, or of one of its tasks, are found.

    name: for sentences. files: what is accepted under --data-dir, in order: names, or layouts. Each is looked for in
    data_dir/folder, then in data_dir, and then in other places (`candidates`): folders of the names `folders`, and
    clones, downloads and caches of the hub's repository and of `repositories`. A name may hold a sub-folder.
    hub, revision, config, split: the copy on the hub. fields: those that every record must have. documents: how many
    records there are, where that is known. sha256: the content hash (see Loaded) that the hub's copy must have, where
    it is known. hub_file: a file of the hub's repository to read in place of a split, for repositories that `datasets`
    cannot load; "data.zip/inner/file.jsonl" is a member of an archive.
    """

    name: str
    files: tuple[str | Layout, ...]
    folder: str
    hub: str
    revision: str | None
    config: str | None
    split: str
    fields: tuple[str, ...]
    sha256: str | None = None
    hub_file: str | None = None
    folders: tuple[str, ...] = ()
    repositories: tuple[str, ...] = ()
    documents: int | None = None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The files, as layouts."""
        return tuple(Layout((file,)) if isinstance(file, str) else file for file in self.files)


@dataclass(frozen=True)
class Loaded:
    """Records of a dataset.

    origin: the file's path under --data-dir (several with " + "), or hub id@commit. sha256: hash of the records as
    canonical JSON, so that equal records have equal hashes wherever they come from.
    """

    records: list[Record]
    origin: str
    sha256: str


class Documents(Sequence[Record]):
    """A task's documents, each made from its record on access, so that long prompts are not held in memory.

    make(index, record) returns document `index`. lm-eval takes this as one split of a data set.
    """

    def __init__(self, records: Sequence[Record], make: Callable[[int, Record], Record]):
        self._records = records
        self._make = make

    @property
    def features(self) -> Mapping[str, None]:
        """The documents' fields: lm-eval asks a data set for its columns."""
        return dict.fromkeys(self[0] if self._records else ())

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._make(index, self._records[index])

    def __deepcopy__(self, memo: object) -> Documents:
        return self  # lm-eval copies a task's settings, these among them

    def __repr__(self) -> str:
        return f"{len(self)} documents"


class Unavailable(UserError):
    """A task cannot run here: its data is neither in the folder nor on the hub or in its cache, or the context is too
    small for it. A default set leaves such a task out; one that the user named is refused with this sentence. (Data
    that is there but broken is a plain UserError.)"""


def load(dataset: Dataset, data_dir: Path | None) -> Loaded:
    """The records of a dataset: from `data_dir` alone if one is given, else from the hub.

    Raises Unavailable where there is nothing, and UserError where the file is empty or unreadable, a record lacks a
    field, or the hub's records are not the pinned ones.
    """
    if data_dir is None:
        records, origin = _from_hub(dataset)
        where = origin
    else:
        try:
            records, origin = _find(dataset, data_dir)
        except OSError as error:
            raise UserError(f"{error.filename or data_dir} cannot be read: {error.strerror or error}.") from error
        where = place(origin, data_dir)
    if not records:
        raise UserError(f"{where} holds no records.")
    _check_fields(records, dataset.fields, where)
    sha256 = content_hash(records)
    if data_dir is None and dataset.sha256 not in (None, sha256):
        raise UserError(
            f"{origin} holds other records than the {dataset.name} that this version knows "
            f"(sha256 {sha256}, expected {dataset.sha256}); give the expected ones with --data-dir."
        )
    return Loaded(records, origin, sha256)


def place(origin: str, data_dir: Path | None) -> str:
    """Where records are from, for sentences: their file with the data folder before it, or the hub's copy."""
    return origin if data_dir is None else str(data_dir / origin)


def incomplete(dataset: Dataset, loaded: Loaded, limit: int | None = None) -> str | None:
    """A sentence where a data set has another number of documents than it is known to have; None where it has all.

    limit: the documents that a run asks for. As long as there are so many, none is missing.
    """
    found, known = len(loaded.records), dataset.documents
    if known is None or found == known or (limit is not None and limit <= found):
        return None
    if found > known:
        return f"{loaded.origin} has {found} documents, and {dataset.name} has {known}: these are not the usual ones."
    return (
        f"{known - found} of the {known} documents of {dataset.name} are missing: {loaded.origin} has {found}, and "
        "the score is over those."
    )


def content_hash(records: list[Record]) -> str:
    """sha256 of the records as JSON with sorted keys and no blanks."""
    text = json.dumps(records, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _find(dataset: Dataset, data_dir: Path) -> tuple[list[Record], str]:
    """The records of the first layout that is there and has its signs, and the names of its files."""
    if not data_dir.is_dir():
        raise UserError(f"The data folder {data_dir} does not exist.")
    folders = (dataset.folder, *dataset.folders)
    repositories = (dataset.hub, *dataset.repositories)
    unreadable: UserError | None = None
    for candidate in candidates(data_dir, dataset.layouts, folders, repositories, dataset.revision):
        origin = " + ".join(file.name for file in candidate.files)
        try:
            records = [record for file in candidate.files for record in read(file.path, file.member)]
            if not records:
                raise UserError(f"{place(origin, data_dir)} holds no records.")
        except UserError as error:
            if candidate.sure:
                raise
            unreadable = unreadable or error
            continue
        if candidate.sure or candidate.layout.fits(records[0]):
            return records, origin
    if unreadable is not None:
        raise unreadable
    names = [" and ".join(layout.paths) for layout in dataset.layouts]
    looked_for = " or ".join(names[:NAMED]) + (f" or {len(names) - NAMED} more" if len(names) > NAMED else "")
    raise Unavailable(
        f"The folder {data_dir} has no {dataset.name} data: looked for {looked_for}, there and in {dataset.folder}/."
    )


def _check_fields(records: list[Record], fields: tuple[str, ...], where: str) -> None:
    for number, record in enumerate(records, start=1):
        for field in fields:
            if record.get(field) is None:
                raise UserError(f"{where}: record {number} has no field {field!r}.")


def _from_hub(dataset: Dataset) -> tuple[list[Record], str]:
    """Records and origin. If the hub does not answer within seconds, its local cache is read."""
    reason = _unreachable()
    try:
        with hub_cache_only(reason is not None):
            return _hub_file(dataset) if dataset.hub_file else _hub_split(dataset)
    except UserError:
        raise
    except Exception as error:  # the libraries raise many kinds, none of them promised
        named = " ".join(filter(None, (dataset.hub, dataset.config)))
        why = f"{reason}, and it is not in the local cache" if reason else first_line(error).rstrip(".")
        files = " or ".join(" and ".join(layout.paths) for layout in dataset.layouts[:NAMED])
        raise Unavailable(
            f"{dataset.name} comes from the hub ({named}), which did not give it ({why}); "
            f"fetch it where there is a network, or give a folder that holds {files} with --data-dir."
        ) from error


@functools.lru_cache(maxsize=1)
def _unreachable() -> str | None:
    return hub.why_unreachable()


def _hub_split(dataset: Dataset) -> tuple[list[Record], str]:
    import datasets

    rows = datasets.load_dataset(dataset.hub, dataset.config, split=dataset.split, revision=dataset.revision)
    # The cache keeps each commit in a folder of that name; without the hub it may be another commit than asked for.
    paths = [Path(file["filename"]).parent.name for file in rows.cache_files]
    commit = next((name for name in paths if re.fullmatch("[0-9a-f]{40}", name)), dataset.revision)
    return list(rows.to_list()), f"{dataset.hub}@{commit}" if commit else dataset.hub


def _hub_file(dataset: Dataset) -> tuple[list[Record], str]:
    from huggingface_hub import hf_hub_download

    assert dataset.hub_file is not None
    name, is_archive, member = dataset.hub_file.partition(".zip/")
    name += ".zip" if is_archive else ""
    local = Path(
        hf_hub_download(
            dataset.hub,
            name,
            repo_type="dataset",
            revision=dataset.revision,
            local_files_only=_unreachable() is not None,
        )
    )
    # .../snapshots/<commit>/<name>
    commit = local.parents[len(PurePosixPath(name).parts) - 1].name
    origin = f"{dataset.hub}@{commit}"
    if not is_archive:
        return read(local), origin
    if not has_member(local, member):
        raise LookupError(f"There is no item named {member!r} in {name}")
    return read(local, member), origin


@contextmanager
def hub_cache_only(unreachable: bool) -> Iterator[None]:
    """Let `datasets` read its local cache alone if the hub is known to be out of reach; it would retry for half a
    minute."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or unreachable
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
