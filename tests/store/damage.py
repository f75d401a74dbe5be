"""Random damage to a folder of results, and what each reading command may then say.

A damaged folder gives the numbers of the undamaged one, or those that are left where whole lines are gone, or a
sentence. It never gives a raw exception, and never another number. Exactly, where a command gives numbers, they are
those of a folder whose samples.jsonl holds the lines that are byte for byte as they were written (a CR at the end does
not matter), or those of the undamaged folder. Lines can be missing because every line stands alone, and a torn last
line is dropped. A line without a checksum, as earlier versions wrote it, does not show that one possible value was put
in the place of another; so damages of that kind are not asked of it.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import pandas as pd
from gate.gate_cases import fidelity_lines
from plot.plot_records import retention, sample, steps, write_run, write_trace

import evictbench
from evictbench.errors import UserError
from evictbench.gate import ask
from evictbench.gate.finding import GateRequest
from evictbench.gate.published import against_published
from evictbench.plot.drawings import drawings
from evictbench.plot.request import PlotRequest
from evictbench.report.build import build
from evictbench.report.protocol import groups
from evictbench.report.protocol import warnings as protocol_warnings
from evictbench.report.request import ReportRequest
from evictbench.report.samples import browser
from evictbench.report.tables import leaderboard
from evictbench.report.warnings import warnings as number_warnings
from evictbench.store import run_folder
from evictbench.store.files import write_json
from evictbench.store.frame import read_results
from evictbench.store.published import read_published
from evictbench.store.summary import summarise
from evictbench.sweep.estimate import _measured_cells

PUBLISHED = read_published()

REQUIRED = ("task", "doc_id", "repeat", "score", "metrics", "occupancy_mean", "cache_bytes", "output_tokens", "session")

IMPOSSIBLE = (
    *("null", "NaN", "Infinity", "1e999", "-1", '"x"', '""', "[]", "{}", '{"a": 1}', "[[1]]", "true", "-0.5", "1e301"),
    *("9" * 5000, "[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000, '"\\ud800"'),
)
"""JSON for values that hardly any field can have."""

POSSIBLE = ("0", "1", "0.5", "false", "7", "1.5", '"niah"', "9" * 30)


def make(root, checksums=True):
    """Runs of three policies and the full cache on two suites, a trace among them, and a baseline with its own."""
    for name, drop in (("runs", 1), ("baseline", 0)):
        runs = root / name
        for policy, budget, right in (("full", None, 7), ("h2o", "64", 4), ("h2o", "25%", 6), ("tova", "64", 5)):
            lines = [
                sample(doc, float(doc < right - drop * (task == "vt")), task=task, repeat=repeat)
                for task in ("niah", "vt")
                for doc in range(8)
                for repeat in range(2)
            ]
            write_run(runs, lines, policy=policy, budget=budget, tasks=("niah", "vt"))
        for policy, budget in (("full", None), ("indexmem_pp:window=8", "48")):
            lines = fidelity_lines(9, kl=0.01 * (budget is not None))
            write_run(runs, lines, policy=policy, budget=budget, tasks=("text",), suite="fidelity")
        found = steps(contexts=(256, 512))
        write_trace(runs / "trace", found, retention())
        write_json(runs / "trace" / "trace.json", _about(found))
    for file in root.rglob("run.json"):
        run = run_folder.read_run(file.parent)
        lines = list(run_folder.read_samples(file.parent).values())
        summary = summarise(lines, {task: len(lines) for task in run["identity"]["tasks"]})
        write_json(file.parent / "summary.json", {"identity": run["identity"], **summary})
        if not checksums:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            (file.parent / run_folder.SAMPLES).write_text(text)
    return root


def _about(found):
    """The trace.json of these steps."""
    shown = {"copy_bandwidth": 1e10, "first_token_seconds": 0.5, "decode_ms": 2.5, "read_bytes_per_second": 1e9}
    shown |= {"decode_cache_bytes": 10**6, "decode_peak_bytes": 10**7, "status": "ok"}
    cells = found.drop_duplicates("cell")[["cell", "policy", "budget", "context", "rows"]].astype(object)
    made_by = {"weights": "sha256:0", "dtype": "float32", "prefill": "native", "chunk": 128, "new_tokens": 32}
    return {
        "model": "tiny",
        "device": "cpu",
        "made_by": made_by,
        "policies": {name: {"settings": {}, "weights": None} for name in ("full", "h2o")},
        "cells": [row | shown for row in cells.where(cells.notna(), None).to_dict("records")],
        "copy_bandwidth": 1e10,
        "read_weight_bytes": 10**8,
    }


def _frame(root):
    return evictbench.results(root / "runs").drop(columns="folder")


def _numbers(root):
    """The columns that every line has to have: others, such as texts, may be missing or other ones."""
    frame = _frame(root)
    kept = [name for name in frame if name in REQUIRED or (name.startswith("metric_") and "kl_q" not in name)]
    return frame[[*kept, "policy", "budget", "suite", "occupancy_max", "truncated", "repetition", "prompt_tokens"]]


def _report(root):
    """Everything of a report but the drawing of figures, which `_drawn` does."""
    samples = read_results(root / "runs", text=False)
    board = leaderboard(samples)
    list(protocol_warnings(groups(samples)))
    packs = browser(samples, None, None, 100_000).packs
    return board.rows, [notice.text for notice in number_warnings(samples, board)], [pack.documents for pack in packs]


def _whole_report(root):
    request = ReportRequest(root / "runs", traces=(root / "runs" / "trace",), out=root / "report.html")
    return len(build(request)[0]) > 10_000


def _plot(folder, root):
    warned = []
    drawn = drawings(PlotRequest(root / "runs" / folder), None, warned.append)
    return [drawing.numbers for drawing in drawn], warned


def _gate(root, exact=False):
    return ask.findings(GateRequest(root / "runs", baseline=root / "baseline", exact=exact))


def _papers(root):
    return against_published(root / "runs", PUBLISHED)


def _estimates(root):
    list(_measured_cells(root / "runs"))


READERS = {
    "results": _frame,
    "report": _report,
    "plot": partial(_plot, ""),
    "plot of a trace": partial(_plot, "trace"),
    "gate": _gate,
    "gate --exact": partial(_gate, exact=True),
    "gate --published": _papers,
    "estimates": _estimates,
}
"""What reads results, each called in this process. Estimates of time are not compared: no table has them."""

FROM_THE_FRAME = ("plot", "gate", "gate --published")
"""Readers that look at nothing but the frame of the runs and at traces: where the frame is the same, so are they."""

FROM_THE_LINES = ("report", "gate --exact")
"""Readers that read lines and runs once more, by the same functions: where the frame is the same, a few of them do."""


def outcome(read, root):
    """What a reader gives, as text to compare, or the UserError that it raises."""
    try:
        return _text(read(root))
    except UserError as error:
        return error


def _text(value):
    if isinstance(value, pd.DataFrame):
        return value.to_csv()
    if dataclasses.is_dataclass(value):
        return _text(dataclasses.asdict(value))
    if isinstance(value, dict):
        return str({str(key): _text(part) for key, part in value.items()})
    if isinstance(value, list | tuple):
        return str([_text(part) for part in value])
    return repr(value)


class Harness:
    """A folder of results that is damaged and mended again and again. checksums: whether its lines have them."""

    def __init__(self, root, checksums=True, readers=READERS):
        warnings.simplefilter("ignore")
        self.root = make(root / "results", checksums)
        self.checksums = checksums
        self.readers = readers if checksums else readers | {"results": _numbers}
        self.whole = {name: outcome(read, self.root) for name, read in self.readers.items()}
        self.whole["the whole report"] = repr(True)
        self.files = sorted(file for file in (self.root / "runs").rglob("*") if file.is_file())
        self.left = {}

    def try_one(self, number):
        """One damage: raises AssertionError where a reader says something else than it may. Returns what was done, and
        how many readers gave a sentence."""
        chance = random.Random(number)
        file = chance.choice(self.files)
        before = file.read_bytes()
        damage = chance.choice(self._kinds(file))
        try:
            what = damage(chance, file)
            after = file.read_bytes() if file.is_file() else b""
            sentences, same = 0, False
            for name, read in self._looking_at(file, number):
                if same and (name in FROM_THE_FRAME or (name in FROM_THE_LINES and number % 4)):
                    continue
                try:
                    found = outcome(read, self.root)
                except Exception as error:
                    words = f"{number}, {what} of {file}: {name}: {type(error).__name__}: {error}"
                    raise AssertionError(words) from error
                same = same or (name == "results" and found == self.whole[name])
                sentences += isinstance(found, UserError)
                if isinstance(found, str) and found != self.whole[name]:
                    left = self._left(name, file, before, after)
                    assert found == left, f"{number}, {what} of {file}: {name} gives other numbers"
            return what, sentences
        finally:
            self._mend(file, before)

    def _looking_at(self, file, number):
        """The readers that look at a file, and now and then the whole report, which draws too."""
        of_a_trace = file.parent.name == "trace"
        for name, read in self.readers.items():
            if name in ("gate", "estimates") or (name == "plot of a trace") == of_a_trace:
                yield name, read
        if number % 100 == 0:
            yield "the whole report", _whole_report

    def _left(self, name, file, before, after):
        """What a reader gives of the lines that are left as they were."""
        if file.name != run_folder.SAMPLES:
            return None
        lines = set(before.splitlines(keepends=True))
        kept = b"".join(whole for line in after.split(b"\n")[:-1] if (whole := line.rstrip(b"\r") + b"\n") in lines)
        if (name, file, kept) not in self.left:
            self._mend(file, kept)
            self.left[name, file, kept] = outcome(self.readers[name], self.root)
            self._mend(file, after)
        return self.left[name, file, kept]

    def _mend(self, file, data):
        for extra in (self.root / "runs").rglob("*copy"):
            shutil.rmtree(extra)
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        elif os.path.lexists(file):
            file.unlink()
        file.write_bytes(data)

    def _kinds(self, file):
        if file.suffix == ".parquet":
            removed = [] if file.name == "retention.parquet" else [_removed]  # a trace need not have one
            return [*removed, _truncated, _flipped, _overwritten, _emptied, _replaced, _as_folder, _garbage_appended]
        texts = [_impossible_value, _impossible_value, _key_removed, _key_twice, _key_renamed, _truncated, _emptied]
        texts += [_bom, _not_utf8, _replaced, _as_folder, _as_pipe, _removed, _key_added]
        if self.checksums:
            texts += [_possible_value, _flipped, _overwritten, _garbage_appended, _digit]
        if file.name == run_folder.SAMPLES:
            texts += [
                _line_twice,
                _lines_swapped,
                _line_removed,
                _lines_merged,
                _crlf,
                _blank_line,
                _copied,
                _long_line,
            ]
            if self.checksums:
                texts += [_of_another_run, _copied_with_another_score]
        elif not self.checksums:
            texts = [kind for kind in texts if kind is not _key_removed]
        return texts


def _edit(file, change):
    file.write_bytes(change(file.read_bytes()))
    return None


def _truncated(chance, file):
    _edit(file, lambda data: data[: chance.randrange(len(data))])
    return "truncated"


def _flipped(chance, file):
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return "a bit flipped"


def _overwritten(chance, file):
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    data[at : at + chance.choice((1, 4, 64, 512))] = chance.choice((bytes(64), chance.randbytes(8), b"\n", b'"'))
    file.write_bytes(data)
    return "bytes overwritten"


def _digit(chance, file):
    data = bytearray(file.read_bytes())
    places = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    data[chance.choice(places or [0])] = chance.randrange(48, 58)
    file.write_bytes(data)
    return "a digit changed"


def _garbage_appended(chance, file):
    _edit(file, lambda data: data + chance.randbytes(chance.randrange(1, 200)))
    return "garbage appended"


def _emptied(chance, file):
    file.write_bytes(chance.choice((b"", b"\n", b" ", b"{}", b"null\n", b"[]")))
    return "emptied"


def _replaced(chance, file):
    file.write_bytes(
        chance.choice((b"PK\x03\x04" + chance.randbytes(500), b"<html></html>\n", b'"text"\n', b"1\n" * 5))
    )
    return "a file of another type"


def _as_folder(chance, file):
    file.unlink()
    file.mkdir()
    return "a folder in its place"


def _as_pipe(chance, file):
    file.unlink()
    os.mkfifo(file)
    return "a pipe in its place"


def _removed(chance, file):
    file.unlink()
    return "removed"


def _bom(chance, file):
    _edit(file, lambda data: b"\xef\xbb\xbf" + data)
    return "a byte order mark"


def _not_utf8(chance, file):
    data = file.read_bytes()
    place = chance.randrange(len(data))
    file.write_bytes(data[:place] + chance.choice((b"\xff", b"\xc3\x28", b"\x80")) + data[place:])
    return "not UTF-8"


def _crlf(chance, file):
    _edit(file, lambda data: data.replace(b"\n", b"\r\n"))
    return "CRLF"


def _lines(file):
    return file.read_bytes().splitlines(keepends=True)


def _line_twice(chance, file):
    lines = _lines(file)
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))
    file.write_bytes(b"".join(lines))
    return "a line twice"


def _lines_swapped(chance, file):
    lines = _lines(file)
    first, second = chance.sample(range(len(lines)), 2)
    lines[first], lines[second] = lines[second], lines[first]
    file.write_bytes(b"".join(lines))
    return "two lines swapped"


def _line_removed(chance, file):
    lines = _lines(file)
    del lines[chance.randrange(len(lines))]
    file.write_bytes(b"".join(lines))
    return "a line removed"


def _lines_merged(chance, file):
    lines = _lines(file)
    place = chance.randrange(len(lines))
    lines[place] = lines[place].rstrip(b"\n")
    file.write_bytes(b"".join(lines))
    return "two lines merged"


def _blank_line(chance, file):
    lines = _lines(file)
    lines.insert(chance.randrange(len(lines) + 1), chance.choice((b"\n", b"  \n", b"\r\n")))
    file.write_bytes(b"".join(lines))
    return "a blank line"


def _long_line(chance, file):
    lines = _lines(file)
    if chance.random() < 0.9:  # it takes a while
        return _blank_line(chance, file)
    lines.insert(chance.randrange(len(lines)), b'{"text": "' + b"x" * 17_000_000 + b'"}\n')
    file.write_bytes(b"".join(lines))
    return "a line of 17 MB"


def _of_another_run(chance, file):
    others = sorted(other for other in file.parents[3].rglob(run_folder.SAMPLES) if other != file)
    shutil.copy(chance.choice(others), file)
    return "another run's samples"


def _copied(chance, file):
    shutil.copytree(file.parent, file.parent.with_name(f"{file.parent.name}-copy"))
    return "a copy of the run"


def _copied_with_another_score(chance, file):
    copy = file.parent.with_name(f"{file.parent.name}-copy")
    shutil.copytree(file.parent, copy)
    run = run_folder.read_run(copy)
    samples = list(run_folder.read_samples(copy).values())
    line = chance.choice(samples)
    line["score"] = 1 - line["score"]
    if "score" in line["metrics"]:
        line["metrics"]["score"] = line["score"]
    data = b"".join(run_folder.sample_line(line, run["fingerprint"]) for line in samples)
    (copy / run_folder.SAMPLES).write_bytes(data)
    return "a copy with another score"


PLACE = "@place@"


def _json_edit(chance, file, edit):
    """Change one line, or the one object, of a JSON file: `edit` is given the objects in it and their keys."""
    lines = _lines(file) if file.suffix == ".jsonl" else [file.read_bytes()]
    at = chance.randrange(len(lines))
    content = json.loads(lines[at])
    found = [(part, key) for part in _objects(content) for key in part]
    if not found:
        return "nothing"
    token = edit(content, found)
    text = json.dumps(content, ensure_ascii=False)
    lines[at] = (text if token is None else text.replace(f'"{PLACE}"', token, 1)).encode() + b"\n"
    file.write_bytes(b"".join(lines))
    return None


def _objects(content):
    if isinstance(content, dict):
        yield content
        for value in content.values():
            yield from _objects(value)
    if isinstance(content, list):
        for value in content:
            yield from _objects(value)


def _value(chance, file, tokens):
    token = chance.choice(tokens)

    def edit(content, found):
        part, key = chance.choice(found)
        part[key] = PLACE
        return token

    _json_edit(chance, file, edit)
    return f"a value that is now {token[:20]}"


def _impossible_value(chance, file):
    return _value(chance, file, IMPOSSIBLE)


def _possible_value(chance, file):
    return _value(chance, file, POSSIBLE)


def _key_removed(chance, file):
    def edit(content, found):
        there = [key for key in REQUIRED if key in content]
        if there:
            del content[chance.choice(there)]
        else:
            part, key = chance.choice(found)
            del part[key]

    _json_edit(chance, file, edit)
    return "a key removed"


def _key_renamed(chance, file):
    def edit(content, found):
        there = [key for key in REQUIRED if key in content]
        part, key = (content, chance.choice(there)) if there else chance.choice(found)
        part[key.upper()] = part.pop(key)

    _json_edit(chance, file, edit)
    return "a key renamed"


def _key_added(chance, file):
    def edit(content, found):
        part = chance.choice([part for part, _ in found])
        if part is content:
            part["a key of later versions"] = [1, {"x": 2}]

    _json_edit(chance, file, edit)
    return "a key added"


def _key_twice(chance, file):
    def edit(content, found):
        part, key = chance.choice(found)
        value = json.dumps(part[key])
        part[key] = PLACE
        return f"{value}, {json.dumps(key)}: {chance.choice((*IMPOSSIBLE[:8], *POSSIBLE))}"

    _json_edit(chance, file, edit)
    return "a key twice"


def main():
    """Try many damages, and print those that were neither right numbers nor a sentence."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    failures, kinds, began = 0, Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        harnesses = [Harness(Path(folder) / str(checksums), checksums) for checksums in (True, False)]
        for done, number in enumerate(range(options.first, options.first + options.count), start=1):
            try:
                what, sentences = harnesses[number % 3 == 2].try_one(number)
                kinds[what.partition(" that ")[0], "a sentence" if sentences else "numbers"] += 1
            except AssertionError as error:
                failures += 1
                print(f"FAILED {str(error)[:500]}", flush=True)
            if done % 100 == 0:
                print(f"{done} of {options.count}, {failures} failed, {time.monotonic() - began:.0f} s", flush=True)
    for (what, how), count in sorted(kinds.items()):
        print(f"{count:6} {what}: {how}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
