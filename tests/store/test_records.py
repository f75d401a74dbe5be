"""The one reader of results: what a line, a run.json and a trace may hold, and the sentence where they hold else."""

import base64
import json
import os
import sys
import tracemalloc
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from plot.plot_records import identity, retention, right, sample, steps, write_run, write_trace

import evictbench
from evictbench.errors import UserError
from evictbench.store import run_folder
from evictbench.store.records import parse_sample, sample_line
from evictbench.store.trace_files import STEPS_FILE, TRACE, read_retention, read_trace

MARK = "0123456789ab"

LINES = {
    "a number": (lambda line: line | {"score": 0.25, "metrics": {"score": 0.25}}, None),
    "a whole number for a measured one": (lambda line: line | {"score": 1, "metrics": {"kl": 2}}, None),
    "a field of later versions": (lambda line: line | {"later": {"x": [1, None]}}, None),
    "a metric of another's suite": (lambda line: line | {"metrics": {"perplexity": 5e4, "gain": -3.5}}, None),
    "no text, as published": (lambda line: {name: line[name] for name in line if name not in ("text", "tokens")}, None),
    "null": (lambda line: line | {"score": None}, "expected float, got null at score"),
    "NaN": (lambda line: line | {"score": float("nan")}, "NaN is no number"),
    "infinity": (lambda line: line | {"occupancy_mean": float("inf")}, "Infinity is no number"),
    "5": (lambda line: line | {"score": 5.0}, "expected float <= 1.0 at score"),
    "-1": (lambda line: line | {"score": -1.0}, "expected float >= 0.0 at score"),
    "a text": (lambda line: line | {"score": "1.0"}, "expected float, got str at score"),
    "a list": (lambda line: line | {"metrics": [1]}, "expected object, got array at metrics"),
    "true": (lambda line: line | {"repeat": True}, "expected int, got bool at repeat"),
    "half a document": (lambda line: line | {"doc_id": 0.5}, "expected int, got float at doc_id"),
    "a document below 0": (lambda line: line | {"doc_id": -1}, "expected int >= 0 at doc_id"),
    "no task": (lambda line: line | {"task": ""}, "length >= 1 at task"),
    "tokens below 0": (lambda line: line | {"output_tokens": -3}, "at output_tokens"),
    "occupancy below 0": (lambda line: line | {"occupancy_mean": -0.5}, "at occupancy_mean"),
    "more than a float holds": (lambda line: line | {"cache_bytes": 10**30}, "at cache_bytes"),
    "another thought": (lambda line: line | {"thinking": "deep"}, "invalid enum value 'deep' at thinking"),
    "agreement above 1": (lambda line: line | {"metrics": {"agreement": 1.5}}, "agreement is 1.5, and is from 0 to 1"),
    "KL below 0": (lambda line: line | {"metrics": {"kl": -0.5}}, "kl is -0.5"),
    "a null metric": (lambda line: line | {"metrics": {"kl": None}}, "got null at metrics"),
    "two scores": (lambda line: line | {"metrics": {"score": 0.0}}, "score is 1, and the metric score 0"),
    "no occupancy": (lambda line: {name: line[name] for name in line if name != "occupancy_mean"}, "occupancy_mean"),
}
"""A change of a line, and what is said about it; None where the line is read."""


@pytest.mark.parametrize(("change", "said"), LINES.values(), ids=LINES)
def test_a_line_has_its_types_and_ranges(change, said):
    line = change(sample(3, 1.0, session=0))
    text = json.dumps(line).encode() + b"\n"
    if said is None:
        assert parse_sample(text, MARK) == line
    else:
        with pytest.raises(ValueError, match=said):
            parse_sample(text, MARK)


RAW = {
    "1e999": (lambda text: text.replace(b'"score": 1.0', b'"score": 1e999', 1), "score|number"),
    "a key twice": (
        lambda text: text.replace(b'"score": 1.0', b'"score": 1.0, "score" : 0.0', 1),
        "score is there twice",
    ),
    "a metric twice": (lambda text: text.replace(b'{"score": 1.0', b'{"kl": 1, "kl": 2', 1), "kl is there twice"),
    "5,000 digits": (lambda text: text.replace(b'"repeat": 0', b'"repeat": ' + b"9" * 5000), "digits"),
    "deep nesting": (lambda text: text[:-2] + b', "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", "nested too deep"),
    "a byte order mark": (lambda text: b"\xef\xbb\xbf" + text, "not JSON"),
    "not UTF-8": (lambda text: text.replace(b"it is", b"it \xff", 1), "is not UTF-8"),
    "a list": (lambda text: b"[]\n", "no JSON object"),
    "nothing": (lambda text: b"\n", "not JSON"),
}


@pytest.mark.parametrize(("change", "said"), RAW.values(), ids=RAW)
def test_what_no_json_of_ours_has_is_refused(change, said):
    text = json.dumps(sample(3, 1.0, session=0)).encode() + b"\n"
    with pytest.raises(ValueError, match=said):
        parse_sample(change(text), MARK)


def test_a_line_as_it_is_written_shows_every_change():
    line = sample(3, 1.0, session=0, text='colons ": and quotes \\" é', metrics={"score": 1.0})
    text = sample_line(line, MARK)
    assert parse_sample(text, MARK) == line
    assert parse_sample(text[:-1] + b"\r\n", MARK) == line
    before, _, checksum = text.rpartition(b', "crc32": ')
    assert checksum == b'"%08x"}\n' % zlib.crc32(before, zlib.crc32(MARK.encode()))
    with pytest.raises(ValueError, match="checksum is another"):
        parse_sample(text, "another run's")
    for place in range(0, len(text) - 30, 7):
        changed = bytearray(text)
        changed[place] ^= 1
        with pytest.raises(ValueError, match=r"checksum|JSON|UTF-8"):
            parse_sample(bytes(changed), MARK)
    moved = json.dumps(dict(reversed(json.loads(text).items()))).encode()
    with pytest.raises(ValueError, match="checksum is not at its end"):
        parse_sample(moved, MARK)


def test_what_could_not_be_read_is_not_written(tmp_path):
    with run_folder.open_run(tmp_path / "run", identity()) as run:
        run.start_session({})
        with pytest.raises(UserError, match=r"A sample of niah cannot be kept \(expected float <= 1.0 at score\)"):
            run.append(sample(0, 1.5))
        run.append(sample(0, 1.0))
    assert len(run_folder.read_samples(tmp_path / "run")) == 1


def changed_line(path, number, **changes):
    file = path / run_folder.SAMPLES
    lines = file.read_bytes().splitlines()
    line = json.loads(lines[number]) | changes
    del line["crc32"]
    lines[number] = json.dumps(line).encode()
    file.write_bytes(b"\n".join(lines) + b"\n")


@pytest.mark.parametrize("number", [0, 2], ids=["in the middle", "the last"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"score": None}, "got null at score"),
        ({"score": float("nan")}, "NaN is no number"),
        ({"task": "vt"}, "the run has no task vt"),
        ({"session": 7}, "the run has no session 7"),
        ({"task": None}, "got null at task"),
    ],
)
def test_a_line_that_cannot_be_right_is_named_with_its_file(tmp_path, number, changes, said):
    path = write_run(tmp_path, right(1, 3))
    changed_line(path, number, **changes)
    with pytest.raises(UserError, match=rf"Line {number + 1} of .*samples\.jsonl is damaged \(.*{said}"):
        evictbench.results(tmp_path)


def test_a_metric_that_a_line_lacks_is_named(tmp_path):
    lines = [sample(doc, 0.9, metrics={"kl": 0.1, "kl_q1": 0.1} if doc < 2 else {}) for doc in range(3)]
    write_run(tmp_path, lines)
    with pytest.raises(UserError, match=r"The metric kl is in some lines of .*samples\.jsonl .* first in line 3"):
        evictbench.results(tmp_path)


def test_a_line_of_200_mb_is_refused_without_its_memory(tmp_path):
    path = write_run(tmp_path, right(1, 2))
    with (path / run_folder.SAMPLES).open("ab") as file:
        file.truncate(200_000_000)
    tracemalloc.start()
    with pytest.raises(UserError, match=r"Line 3 of .*samples\.jsonl is longer than 16,000,000 bytes"):
        evictbench.results(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 60_000_000
    tracemalloc.stop()


def test_a_copy_with_another_score_is_named(tmp_path):
    one, two = write_run(tmp_path / "a", right(1, 2)), write_run(tmp_path / "b", right(2, 2))
    with pytest.raises(UserError) as refused:
        evictbench.results(tmp_path)
    assert str(one) in str(refused.value)
    assert str(two) in str(refused.value)
    assert "document 1 of niah" in str(refused.value)


RUNS = {
    "another label": ({"policy": {"name": "h2o", "label": "tova", "settings": {}}}, "label is 'tova'"),
    "a budget of words": ({"budget": "much"}, "budget is 'much'"),
    "a budget that is written otherwise": ({"budget": "+64"}, r"budget is '\+64'"),
    "a model without a name": ({"model": ""}, "at identity.model"),
    "tasks in a list": ({"tasks": ["niah"]}, "expected object, got array at identity.tasks"),
    "a temperature below 0": ({"temperature": -1.0}, "at identity.protocol.temperature"),
    "settings in a text": ({"policy": {"name": "h2o", "label": "h2o", "settings": "x"}}, "identity.policy.settings"),
}


@pytest.mark.parametrize(("changes", "said"), RUNS.values(), ids=RUNS)
def test_a_run_has_its_types_and_ranges(tmp_path, changes, said):
    path = write_run(tmp_path, right(1, 2))
    protocol = {name: value for name, value in changes.items() if name == "temperature"}
    whole = identity(**protocol) | {name: value for name, value in changes.items() if name not in protocol}
    run = {"results_version": 1, "fingerprint": run_folder.fingerprint_hash(whole), "identity": whole, "sessions": [{}]}
    (path / run_folder.RUN).write_text(json.dumps(run))
    with pytest.raises(UserError, match=rf"run\.json is damaged \(.*{said}"):
        evictbench.results(tmp_path)


def test_a_run_that_says_something_else_than_its_fingerprint_is_refused(tmp_path):
    path = write_run(tmp_path, right(1, 2), budget="64")
    text = (path / run_folder.RUN).read_text()
    (path / run_folder.RUN).write_text(text.replace('"budget": "64"', '"budget": "65"'))
    with pytest.raises(UserError, match=r"its fingerprint [0-9a-f]{12} is not that of what it says"):
        evictbench.results(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "samples.jsonl"])
def test_what_is_no_file_is_not_opened(tmp_path, name):
    path = write_run(tmp_path, right(1, 2))
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(UserError, match=rf"{name} cannot be read: it is not a file"):
        evictbench.results(tmp_path)


def test_prompt_ids_that_unpack_to_gigabytes_do_not():
    bomb = zlib.compress(bytes(50_000_000), 9)
    with pytest.raises(ValueError, match="do not unpack"):
        run_folder.prompt_ids({"prompt_ids": base64.b64encode(bomb).decode()})
    with pytest.raises(ValueError, match="do not unpack"):
        run_folder.prompt_ids({"prompt_ids": "AAAA"})
    ids = tuple(range(run_folder.MOST_IDS))
    assert run_folder.prompt_ids({"prompt_ids": run_folder.pack_ids(ids)}) == ids


STEPS = {
    "a time below 0": ({"ms": -1.0}, "row 3: ms is -1.0"),
    "a time that is none": ({"ms": float("nan")}, "row 3: ms is None"),
    "no end of time": ({"ms": float("inf")}, "row 3: ms is inf"),
    "no end of positions": ({"position": 2**61}, "row 3: position is 2305843009213693952"),
    "another phase": ({"phase": "pause"}, "row 3: phase is pause"),
    "no rows": ({"rows": 0}, "row 3: rows is 0"),
    "entries below 0": ({"entries_mean": -2.0}, "row 3: entries_mean is -2.0"),
    "a nameless policy": ({"policy": ""}, "row 3: policy is"),
}


@pytest.mark.parametrize(("changes", "said"), STEPS.values(), ids=STEPS)
def test_the_steps_of_a_trace_have_their_ranges(tmp_path, changes, said):
    found = steps()
    for name, value in changes.items():
        found.loc[2, name] = value
    folder = write_trace(tmp_path / "trace", found)
    with pytest.raises(UserError, match=rf"trace\.parquet is damaged \({said}"):
        read_trace(folder)


def test_the_positions_of_a_trace_are_those_of_seen_tokens(tmp_path):
    kept = retention()
    kept.at[1, "positions"] = [3, 2]
    with pytest.raises(UserError, match=r"retention\.parquet is damaged \(row 2: positions"):
        read_retention(write_trace(tmp_path / "trace", steps(), kept))


@pytest.mark.parametrize("about", ["[]", '{"model": 7}', '{"cells": [{"cell": -1}]}', '{"model": "x", "model": "y"}'])
def test_the_record_of_a_trace_is_checked(tmp_path, about):
    folder = write_trace(tmp_path / "trace", steps())
    (folder / TRACE).write_text(about)
    with pytest.raises(UserError, match=r"trace\.json is not the record of a trace \("):
        read_trace(folder)


def test_a_page_of_a_trace_shows_a_change(tmp_path):
    """What `evictbench trace` writes has a checksum a page."""
    from evictbench.trace.store import opened

    with opened(tmp_path / "trace", {"made_by": {}}) as folder:
        rows = steps().astype(object).where(lambda frame: frame.notna(), None).to_dict("records")
        line = {
            "policy": "h2o",
            "budget": None,
            "context": 1,
            "rows": 1,
            "status": "out of memory",
            "copy_bandwidth": 1.0,
        }
        folder.add({"cell": 0} | line, rows, [])
    file = tmp_path / "trace" / STEPS_FILE
    whole = file.read_bytes()
    before = read_trace(tmp_path / "trace")[1]
    for place in range(8, len(whole) // 2, len(whole) // 100):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with suppress(UserError):
            assert read_trace(tmp_path / "trace")[1].equals(before)


OPENED = []


def _note(event, arguments):
    if event in ("open", "import", "os.listdir", "os.scandir") and OPENED and isinstance(arguments[0], str):
        OPENED.append(arguments[0])


def test_no_name_in_results_is_run_or_opened(tmp_path, monkeypatch):
    """Names of policies, suites, models and weights that are paths: what they name would leave a mark, or be opened."""
    from evictbench.gate import ask
    from evictbench.gate.finding import GateRequest
    from evictbench.plot.drawings import drawings
    from evictbench.plot.request import PlotRequest
    from evictbench.report.build import build
    from evictbench.report.request import ReportRequest
    from evictbench.report.samples import load
    from evictbench.sweep.estimate import _measured_cells

    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "pwn.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'marker')!r}).touch()\nclass X: ...\n")
    (evil / "tokenizer.json").write_text("{}")
    (evil / "task.yaml").write_text("task: evil\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for root in ("runs", "base"):
        for policy in ("evil/pwn.py:X", f"{evil}/pwn.py:X:a=1", "indexmem_pp:budgets=table,table=evil/pwn.py"):
            changes = {"model": "./evil", "weights": "commit:../../evil", "suite": "lm-eval:evil/task.yaml"}
            write_run(tmp_path / root, right(8, 9), policy=policy, **changes)
    write_trace(tmp_path / "runs" / "trace", steps().replace({"h2o": "evil/pwn.py:X"}))
    write_trace(tmp_path / "base" / "trace", steps().replace({"h2o": "evil/pwn.py:X"}))
    runs = tmp_path / "runs"
    sys.addaudithook(_note)
    OPENED.append("begin")
    try:
        evictbench.results(runs)
        list(_measured_cells(runs))
        list(drawings(PlotRequest(runs), ["budget"], lambda _: None))
        for drawing in drawings(PlotRequest(runs / "trace"), None, lambda _: None):
            assert len(drawing.numbers)
        ask.findings(GateRequest(runs, baseline=tmp_path / "base"))
        ask.findings(GateRequest(runs, baseline=tmp_path / "base", exact=True))
        build(ReportRequest(runs))
        for model in ("evil", "./evil", str(evil), "../evil", "evil@../evil", "smollm2/../evil"):
            for weights in ("sha256:0", "commit:../../evil", f"commit:{evil}"):
                assert load(model, weights) is None
    finally:
        opened = OPENED[1:]
        OPENED.clear()
    assert not (tmp_path / "marker").exists()
    assert any(str(runs) in name for name in opened)
    assert not [name for name in opened if Path(name).resolve().is_relative_to(evil)]
