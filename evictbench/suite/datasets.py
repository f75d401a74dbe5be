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

Record = dict[str, Any]


@dataclass(frozen=True)
class Dataset:
    """Where the records of one benchmark, or of one of its tasks, are found.

    name: for sentences. files: file names accepted under --data-dir, in order. Each is looked for in data_dir/folder,
    then in data_dir; a name may hold a sub-folder. hub, revision, config, split: the copy on the hub. fields: those
    that every record must have. sha256: the content hash (see Loaded) that the hub's copy must have, where it is known.
    hub_file: a file of the hub's repository to read in place of a split, for repositories that `datasets` cannot
    load; "data.zip/inner/file.jsonl" is a member of an archive.
    """

    name: str
    files: tuple[str, ...]
    folder: str
    hub: str
    revision: str | None
    config: str | None
    split: str
    fields: tuple[str, ...]
    sha256: str | None = None
    hub_file: str | None = None


@dataclass(frozen=True)
class Loaded:
    """Records of a dataset. origin: the file's path under --data-dir, or hub id@commit. sha256: hash of the records as
    canonical JSON, so that equal records have equal hashes wherever they come from."""

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
        path = _find(dataset, data_dir)
        records, origin, where = read(path), path.relative_to(data_dir).as_posix(), str(path)
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


def read(path: Path) -> list[Record]:
    """The records of a .jsonl, .json (a list, or an object with `examples` or `data`) or .parquet file.

    Raises UserError naming the file, and the line where there is one.
    """
    reader = {".jsonl": _lines, ".json": _json, ".parquet": _parquet}.get(path.suffix)
    if reader is None:
        raise UserError(f"{path} is neither .jsonl nor .json nor .parquet.")
    try:
        records = reader(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise UserError(f"{path}: record {number} is {type(record).__name__}, not an object with fields.")
    return records


def content_hash(records: list[Record]) -> str:
    """sha256 of the records as JSON with sorted keys and no blanks."""
    text = json.dumps(records, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _find(dataset: Dataset, data_dir: Path) -> Path:
    if not data_dir.is_dir():
        raise UserError(f"The data folder {data_dir} does not exist.")
    for file in dataset.files:
        for path in (data_dir / dataset.folder / file, data_dir / file):
            if path.is_file():
                return path
    names = " or ".join(dataset.files)
    raise Unavailable(
        f"The folder {data_dir} has no {dataset.name} data: looked for {names}, there and in {dataset.folder}/."
    )


def _check_fields(records: list[Record], fields: tuple[str, ...], where: str) -> None:
    for number, record in enumerate(records, start=1):
        for field in fields:
            if record.get(field) is None:
                raise UserError(f"{where}: record {number} has no field {field!r}.")


def _lines(path: Path) -> list[Any]:
    records = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    records.append(json.loads(line))
                except ValueError as error:
                    raise UserError(f"{path}: line {number} is not valid JSON: {error}.") from error
    return records


def _json(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8-sig")
    if not text.strip():
        return []
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from error
    if isinstance(content, dict):
        content = content.get("examples", content.get("data"))
    if not isinstance(content, list):
        raise UserError(f"{path} is neither a list of records nor an object with the list `examples` or `data`.")
    return content


def _parquet(path: Path) -> list[Any]:
    import pyarrow.parquet
    from pyarrow import ArrowException

    try:
        return list(pyarrow.parquet.read_table(path).to_pylist())
    except ArrowException as error:
        raise UserError(f"{path} is not a parquet file that can be read: {first_line(error).rstrip('.')}.") from error


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
        files = " or ".join(dataset.files)
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
    import tempfile
    from zipfile import ZipFile

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
    with tempfile.TemporaryDirectory() as folder, ZipFile(local) as archive:
        return read(Path(archive.extract(member, folder))), origin


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
