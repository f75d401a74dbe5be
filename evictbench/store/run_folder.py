"""What a run leaves on disk, under `<root>/<suite>/<model>/<policy>-<budget>-<fingerprint>/`, and reading it back.

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
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evictbench.errors import UserError
from evictbench.store.files import write_json

RESULTS_VERSION = 1
"""Raised when the same command would give other scores than before; results of two versions never mix."""

RUN, SAMPLES, SUMMARY, LOCK = "run.json", "samples.jsonl", "summary.json", ".lock"

Key = tuple[str, int, int]
"""A sample: its task, the number of its document, and its repeat."""


class Held(UserError):
    """Another process is writing to that folder."""


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Twelve hex digits that stand for everything in `identity`, in any order, and for `RESULTS_VERSION`."""
    whole = json.dumps({**identity, "results_version": RESULTS_VERSION}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:12]


def run_folder(root: Path, suite: str, model: str, policy: str, budget: str | None, mark: str) -> Path:
    """The folder of one cell. `model` may be a hub id, `policy` may carry settings, `budget` may end in %."""
    budget = "none" if budget is None else budget.replace("%", "pct")
    return root / _plain(suite) / _plain(model) / f"{_plain(policy)}-{budget}-{mark}"


def check_root(root: Path) -> None:
    """Raise UserError unless `root` can hold results: new, empty, or already holding some."""
    parent = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not parent.is_dir():
        raise UserError(f"{parent} is a file; results need a folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"Results cannot be written to {root}: no permission in {parent}.")
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
        """Note where the next samples come from. Returns a sentence for each thing that differs from before."""
        before: list[dict[str, Any]] = self.run["sessions"]
        changes = []
        if self.samples and before:
            known = before[-1]
            changes = [
                f"Earlier samples in {self.path} were made with {name} {known.get(name)}, these with {value}."
                for name, value in session.items()
                if name != "started" and known.get(name) != value
            ]
        before.append(dict(session))
        self.session = len(before) - 1
        write_json(self.path / RUN, self.run)
        return changes

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add one finished sample: one line in one write, on the disk when this returns."""
        line = {**sample, "session": self.session}
        data = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="surrogatepass")
        file = os.open(self.path / SAMPLES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            end = os.fstat(file).st_size
            if os.write(file, data) != len(data):
                os.ftruncate(file, end)
                raise OSError(f"the disk took only part of a sample: {self.path / SAMPLES}")
            os.fsync(file)
        finally:
            os.close(file)
        self.samples[key_of(line)] = line

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json."""
        write_json(self.path / SUMMARY, summary)


@contextmanager
def open_run(path: Path, identity: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Hold a cell's folder, made if need be, with the finished samples in it; a torn last line is cut off.

    Raises Held if another process holds it, UserError if it holds something else.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path / LOCK)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise Held(f"Another run is writing to {path}: wait for it to end, or stop it.") from None
    except OSError as error:
        raise UserError(f"Results cannot be written to {path}: {error.strerror or error}.") from error
    try:
        for unfinished in path.glob(".*.json-*"):  # left by a process that was killed
            unfinished.unlink()
        if (path / RUN).exists():
            run = read_run(path)
            if run["fingerprint"] != fingerprint(identity):
                raise UserError(f"{path} holds another run than its name says: name another folder with --out.")
        elif (path / SAMPLES).exists():
            raise UserError(f"{path} holds samples but no {RUN}, so it is not one of ours: move it away.")
        else:
            run = {
                "results_version": RESULTS_VERSION,
                "fingerprint": fingerprint(identity),
                "identity": dict(identity),
                "sessions": [],
            }
            write_json(path / RUN, run)
        samples, whole = _read_samples(path / SAMPLES)
        if (path / SAMPLES).exists() and whole < (path / SAMPLES).stat().st_size:
            os.truncate(path / SAMPLES, whole)
        yield RunFolder(path, run, samples)
    finally:
        lock.release()


def read_run(path: Path) -> dict[str, Any]:
    """The run.json of a cell's folder; UserError if it is not one of ours."""
    if not _is_run(path / RUN):
        raise UserError(f"{path / RUN} is not the record of an evictbench run.")
    run: dict[str, Any] = json.loads((path / RUN).read_text())
    if run["results_version"] > RESULTS_VERSION:
        raise UserError(f"{path} was written by a newer evictbench: update this one.")
    return run


def read_samples(path: Path) -> dict[Key, dict[str, Any]]:
    """The finished samples of a cell's folder. A torn last line is left out; the file is not touched."""
    return _read_samples(path / SAMPLES)[0]


def key_of(line: Mapping[str, Any]) -> Key:
    """Which sample a line is."""
    return line["task"], line["doc_id"], line["repeat"]


def hash_ids(ids: Sequence[int]) -> str:
    """Sixteen hex digits that stand for a sequence of token ids."""
    return hashlib.sha256(_as_bytes(ids)).hexdigest()[:16]


def pack_ids(ids: Sequence[int]) -> str:
    """Token ids as text: little-endian 32-bit integers, zlib, base64; about two bytes a token."""
    return base64.b64encode(zlib.compress(_as_bytes(ids))).decode()


def prompt_ids(line: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The prompt's token ids in a sample line; None where the prompt was too long to keep."""
    packed = line.get("prompt_ids")
    if packed is None:
        return None
    import numpy as np

    return tuple(np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype="<u4").tolist())


def _as_bytes(ids: Sequence[int]) -> bytes:
    import numpy as np

    return np.asarray(ids, dtype="<u4").tobytes()


def _is_run(file: Path) -> bool:
    try:
        content = json.loads(file.read_text())
        return bool({"results_version", "fingerprint", "identity", "sessions"} <= content.keys())
    except (OSError, ValueError, AttributeError):
        return False


def _plain(name: str) -> str:
    """A name that is one folder on any system: an organisation's slash doubles into dashes, as on the hub."""
    name = name.replace("/", "--").replace(":", "+")
    return re.sub(r"[^\w.+,=-]", "_", name).lstrip(".") or "_"


def _read_samples(file: Path) -> tuple[dict[Key, dict[str, Any]], int]:
    """The samples in a file, and how many bytes of it are whole lines. A sample written twice counts once, as it
    was first written."""
    samples: dict[Key, dict[str, Any]] = {}
    whole = 0
    data = file.read_bytes() if file.exists() else b""
    lines = data.splitlines(keepends=True)
    for number, raw in enumerate(lines, start=1):
        last = number == len(lines)
        try:
            line = json.loads(raw)
            key = key_of(line)
        except (ValueError, TypeError, KeyError):
            if last:
                break
            raise UserError(f"Line {number} of {file} is damaged: remove that line to go on with the rest.") from None
        if last and not raw.endswith(b"\n"):
            break
        samples.setdefault(key, line)
        whole += len(raw)
    return samples, whole
