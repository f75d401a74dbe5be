"""The files of a run, in `<root>/<suite>/<model>/<policy>-<budget>-<fingerprint>/`, and reading them back.

    run.json       what was run (the identity that the fingerprint is made of), and every session that added to it
    samples.jsonl  one line per sample and repeat, appended as it finishes
    summary.json   scores and costs per task, rewritten whenever a session ends

The fingerprint says which samples may stand in one table: same model and weights, policy and settings, budget,
tasks and data, protocol, dtype, seed. How many samples, how many rows at a time, on what device and with which
library versions is not part of it; those are kept per session, and each line names its session.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evictbench.errors import UserError
from evictbench.store.files import append_line, check_writable, cut_to, locked, read_lines, write_json
from evictbench.store.records import COMPLETE, Run, checked, is_json, parse_sample, read_object, sample_line

RESULTS_VERSION = 1
"""Raised when the same command would give other scores than before; results of two versions never mix."""

RUN, SAMPLES, SUMMARY = "run.json", "samples.jsonl", "summary.json"

MOST_IDS = 65_536
"""Prompts of up to this many tokens keep their ids in the sample line; longer ones their hash only."""

_FIELDS = frozenset(Run.__struct_fields__)

Key = tuple[str, int, int]
"""A sample: its task, the number of its document, and its repeat."""


class Held(UserError):
    """Another process is writing to that folder."""


def fingerprint_hash(identity: Mapping[str, Any], version: int | None = None) -> str:
    """Twelve hex digits that stand for everything in `identity`, in any order, and for the results version."""
    version = RESULTS_VERSION if version is None else version
    whole = json.dumps({**identity, "results_version": version}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:12]


def run_folder(root: Path, suite: str, model: str, policy: str, budget: str | None, mark: str) -> Path:
    """The folder of one cell. `model` may be a hub id, `policy` may carry settings, `budget` may end in %."""
    budget = "none" if budget is None else budget.replace("%", "pct")
    return root / _plain(suite) / _plain(model) / f"{_plain(policy)}-{budget}-{mark}"


def check_root(root: Path) -> None:
    """Raise UserError unless `root` can hold results: new, empty, or already holding some."""
    check_writable(root, "Results", "results need")
    if root.is_dir() and not any(_is_run(file) for file in root.glob(f"*/*/*/{RUN}")):
        foreign = sorted(path.name for path in root.iterdir() if path.is_file() and path.name[0] != ".")
        foreign += sorted(str(path.relative_to(root)) for path in root.glob("*/*") if path.is_file())
        if foreign:
            raise UserError(f"{root} is not a folder of evictbench results (it holds {foreign[0]}): name another.")


class RunFolder:
    """One cell's folder, held open for writing. Made by `open_run`; nobody else can write while it is held."""

    def __init__(self, path: Path, run: dict[str, Any], samples: dict[Key, dict[str, Any]]) -> None:
        self.path = path
        self.run = run
        self.samples = samples
        self.session = -1

    def start_session(self, session: Mapping[str, Any]) -> list[str]:
        """Record where the next samples come from. Returns a sentence about each change since the last session."""
        before: list[dict[str, Any]] = self.run["sessions"]
        changes = []
        if self.samples and before:
            known = before[-1]
            changes = [
                f"Earlier samples in {self.path} were made with {name} {known.get(name)}, these with {value}."
                for name, value in session.items()
                if name != "started" and name in known and known[name] != value
            ]
        before.append(dict(session))
        self.session = len(before) - 1
        write_json(self.path / RUN, self.run)
        return changes

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add one finished sample: one line in one write, on the disk when this returns. Raises UserError for one that
        could not be read again."""
        line = {**sample, "session": self.session}
        try:
            data = sample_line(line, self.run["fingerprint"])
            parse_sample(data, self.run["fingerprint"])
        except ValueError as error:
            raise UserError(f"A sample of {sample.get('task')} cannot be kept ({error}).") from None
        append_line(self.path / SAMPLES, data)
        self.samples[key_of(line)] = line

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json."""
        write_json(self.path / SUMMARY, summary)


@contextmanager
def open_run(path: Path, identity: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Make a cell's folder if need be, lock it, and read its finished samples; a torn last line is cut off.

    Raises Held if another process has the lock, UserError if the folder holds something else.
    """
    held = Held(f"Another run is writing to {path}: wait for it to end, or stop it.")
    with locked(path, "Results", held):
        if (path / RUN).exists():
            run = read_run(path)
            if run["fingerprint"] != fingerprint_hash(identity):
                raise UserError(f"{path} holds another run than its name says: name another folder with --out.")
        elif (path / SAMPLES).exists():
            raise UserError(f"{path} holds samples but no {RUN}, so it is not one of ours: move it away.")
        else:
            run = {
                "results_version": RESULTS_VERSION,
                "fingerprint": fingerprint_hash(identity),
                "identity": dict(identity),
                "sessions": [],
            }
            write_json(path / RUN, run)
        samples, size = _read_samples(path, run)
        cut_to(path / SAMPLES, size)
        yield RunFolder(path, run, samples)


def read_run(path: Path) -> dict[str, Any]:
    """The run.json of a cell's folder, checked; UserError if it is not one of ours, damaged, or says another identity
    than its fingerprint was made of."""
    file = path / RUN
    run = read_object(file)
    if not run.keys() >= _FIELDS:
        raise UserError(f"{file} is not the record of an evictbench run.")
    if type(version := run["results_version"]) is int and version > RESULTS_VERSION:
        raise UserError(f"{path} was written by a newer evictbench: update this one.")
    try:
        checked(run, Run)
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): move that run away.") from None
    if run["fingerprint"] != fingerprint_hash(run["identity"], run["results_version"]):
        raise UserError(
            f"{file} is damaged (its fingerprint {run['fingerprint']} is not that of what it says): move that run away."
        )
    return run


def read_samples(path: Path) -> dict[Key, dict[str, Any]]:
    """The finished samples of a cell's folder, checked. A torn last line is left out; the file is not touched."""
    if not (path / SAMPLES).exists():
        return {}
    if not (path / RUN).exists():
        raise UserError(f"{path} holds samples but no {RUN}: move it away.")
    return _read_samples(path, read_run(path))[0]


def light_samples(path: Path, run: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """`read_samples` without the fields that take the most room. run: the folder's run.json."""
    return _read_samples(path, run, light=True)[0]


def key_of(line: Mapping[str, Any]) -> Key:
    """The sample that a line is about."""
    return line["task"], line["doc_id"], line["repeat"]


def hash_ids(ids: Sequence[int]) -> str:
    """Sixteen hex digits that stand for a sequence of token ids."""
    return hashlib.sha256(_as_bytes(ids)).hexdigest()[:16]


def pack_ids(ids: Sequence[int]) -> str:
    """Token ids as text: little-endian 32-bit integers, zlib, base64; about two bytes a token."""
    return base64.b64encode(zlib.compress(_as_bytes(ids))).decode()


def prompt_ids(line: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The prompt's token ids in a sample line; None where the prompt was too long to keep. Raises ValueError if they do
    not unpack, or are more than any run keeps."""
    packed = line.get("prompt_ids")
    if packed is None:
        return None
    import numpy as np

    unpacking = zlib.decompressobj()
    try:
        ids = unpacking.decompress(base64.b64decode(packed, validate=True), 4 * MOST_IDS + 1)
    except zlib.error as error:
        raise ValueError(f"the prompt's ids do not unpack: {error}") from None
    if not unpacking.eof:
        raise ValueError("the prompt's ids do not unpack")
    return tuple(np.frombuffer(ids, dtype="<u4").tolist())


def _as_bytes(ids: Sequence[int]) -> bytes:
    import numpy as np

    return np.asarray(ids, dtype="<u4").tobytes()


def _is_run(file: Path) -> bool:
    try:
        return read_object(file).keys() >= _FIELDS
    except UserError:
        return False


def _plain(name: str) -> str:
    """A name that is one folder on any system: an organisation's slash doubles into dashes, as on the hub."""
    name = name.replace("/", "--").replace(":", "+")
    return re.sub(r"[^\w.+,=-]", "_", name).lstrip(".") or "_"


def _read_samples(path: Path, run: Mapping[str, Any], light: bool = False) -> tuple[dict[Key, dict[str, Any]], int]:
    """The samples of a cell's folder, and how many bytes of the file are whole lines. Of a sample that was written
    twice, the first line counts; two that say different things are an error."""
    file, fingerprint = path / SAMPLES, run["fingerprint"]
    known, sessions = run["identity"]["tasks"], len(run["sessions"])

    def parse(line: bytes) -> dict[str, Any]:
        sample = parse_sample(line, fingerprint, light)
        if sample["task"] not in known:
            raise ValueError(f"the run has no task {sample['task']}")
        if sample["session"] >= sessions:
            raise ValueError(f"the run has no session {sample['session']}")
        return sample

    lines, size = read_lines(file, parse, is_json)
    samples: dict[Key, dict[str, Any]] = {}
    metrics: dict[str, frozenset[str]] = {}
    for number, sample in enumerate(lines, start=1):
        names = COMPLETE & sample["metrics"].keys()
        if metrics.setdefault(sample["task"], names) != names:
            missing = min(metrics[sample["task"]] ^ names)
            raise UserError(
                f"The metric {missing} is in some lines of {file} and not in others: first in line {number}."
            )
        first = samples.setdefault(key_of(sample), sample)
        if first is not sample and measured(first) != measured(sample):
            raise UserError(f"Line {number} of {file} has another result than an earlier line of {named(sample)}.")
    return samples, size


def measured(sample: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two lines of one sample must have alike."""
    return sample["score"], sample["metrics"]


def named(sample: Mapping[str, Any]) -> str:
    """A sample in a sentence."""
    return f"document {sample['doc_id']} of {sample['task']}, repeat {sample['repeat']}"
