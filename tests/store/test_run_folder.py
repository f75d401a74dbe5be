"""Results on disk: fingerprints, torn lines, damaged files, two processes, reading back."""

import copy
import json
import multiprocessing
import os

import pytest
from plot.plot_records import sample

from evictbench.errors import UserError, WriteFailed
from evictbench.store import run_folder
from evictbench.store.files import write_json
from evictbench.store.frame import read_results

IDENTITY = {
    "suite": "toy",
    "tasks": {"toy_recall": "1.0"},
    "data": {"words": "abc"},
    "model": "org/tiny",
    "weights": "sha256:1",
    "policy": {"name": "hoard", "label": "hoard:size=4", "settings": {"size": 4}, "source": None},
    "budget": "25%",
    "protocol": {"context": 256, "question": "unseen", "chat": True, "prefill": "native", "chunk": 512},
    "dtype": "float32",
    "seed": 0,
}


def line(doc_id, score=1.0, **more):
    return sample(doc_id, score, task="toy_recall", text="naïve 🐦 \u2028 x") | more


def folder_for(root, identity=IDENTITY):
    mark = run_folder.fingerprint_hash(identity)
    return run_folder.run_folder(root, "toy", "org/tiny", "hoard:size=4", "25%", mark)


def make(root, lines, identity=IDENTITY, session=None):
    path = folder_for(root, identity)
    with run_folder.open_run(path, identity) as run:
        run.start_session({"started": "now", "torch": "2"} | (session or {}))
        for one in lines:
            run.append(one)
    return path


def test_the_folder_says_what_is_in_it(tmp_path):
    path = folder_for(tmp_path)
    assert path.parent.relative_to(tmp_path).as_posix() == "toy/org--tiny"
    assert path.name == f"hoard+size=4-25pct-{run_folder.fingerprint_hash(IDENTITY)}"


@pytest.mark.parametrize("name", ["../up", "..", "a/b", ".hidden", "a b\nc"])
def test_a_name_never_leaves_its_folder(tmp_path, name):
    path = run_folder.run_folder(tmp_path, "toy", name, "hoard", None, "0")
    assert path.resolve().parents[2] == tmp_path.resolve()
    assert path.parent.name[0] != "."


def test_the_fingerprint_is_stable():
    """Written down, so that a change of it cannot go unnoticed: results of before would be made again."""
    assert run_folder.fingerprint_hash(IDENTITY) == "4ce4e4a8453f"
    assert run_folder.fingerprint_hash(dict(reversed(IDENTITY.items()))) == run_folder.fingerprint_hash(IDENTITY)


@pytest.mark.parametrize(
    "where",
    [
        ("weights",),
        ("model",),
        ("budget",),
        ("dtype",),
        ("seed",),
        ("tasks", "toy_recall"),
        ("data", "words"),
        ("policy", "settings", "size"),
        ("policy", "source"),
        ("protocol", "question"),
        ("protocol", "chunk"),
    ],
)
def test_the_fingerprint_changes_with_everything_that_moves_a_score(where):
    other = copy.deepcopy(IDENTITY)
    inner = other
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = "other"
    assert run_folder.fingerprint_hash(other) != run_folder.fingerprint_hash(IDENTITY)


def test_the_fingerprint_changes_with_the_results_version(monkeypatch):
    before = run_folder.fingerprint_hash(IDENTITY)
    monkeypatch.setattr(run_folder, "RESULTS_VERSION", run_folder.RESULTS_VERSION + 1)
    assert run_folder.fingerprint_hash(IDENTITY) != before


def test_samples_come_back_as_written(tmp_path):
    path = make(tmp_path, [line(0), line(1, score=0.5)])
    samples = run_folder.read_samples(path)
    assert list(samples) == [("toy_recall", 0, 0), ("toy_recall", 1, 0)]
    assert samples["toy_recall", 1, 0]["score"] == 0.5
    assert samples["toy_recall", 0, 0]["text"] == "naïve 🐦 \u2028 x"
    assert samples["toy_recall", 0, 0]["session"] == 0


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_dropped_on_reading_and_cut_off_before_writing(tmp_path, cut):
    path = make(tmp_path, [line(0), line(1), line(2)])
    file = path / run_folder.SAMPLES
    whole = file.read_bytes()
    torn = whole[:-cut]
    file.write_bytes(torn)
    assert list(run_folder.read_samples(path)) == [("toy_recall", 0, 0), ("toy_recall", 1, 0)]
    assert file.read_bytes() == torn
    make(tmp_path, [line(2)])
    first, second, _ = whole.splitlines(keepends=True)
    assert file.read_bytes().startswith(first + second + b'{"task"')
    assert [key[1] for key in run_folder.read_samples(path)] == [0, 1, 2]


def test_a_damaged_line_in_the_middle_is_named_and_not_skipped(tmp_path):
    path = make(tmp_path, [line(0), line(1), line(2)])
    file = path / run_folder.SAMPLES
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"\0\0\0\0\n" + lines[2])
    with pytest.raises(UserError, match=r"Line 2 of .*samples\.jsonl is damaged"):
        run_folder.read_samples(path)


def test_a_sample_written_twice_counts_once(tmp_path):
    path = make(tmp_path, [line(0, score=1.0)])
    file = path / run_folder.SAMPLES
    file.write_bytes(2 * file.read_bytes())
    assert [one["score"] for one in run_folder.read_samples(path).values()] == [1.0]


def test_a_sample_with_two_results_is_named(tmp_path):
    path = make(tmp_path, [line(0, score=1.0), line(1), line(0, score=0.0)])
    with pytest.raises(UserError, match=r"Line 3 of .*samples\.jsonl has another result than an earlier line"):
        run_folder.read_samples(path)


def test_a_disk_that_takes_half_a_line_leaves_none_of_it(tmp_path, monkeypatch):
    path = make(tmp_path, [line(0)])
    before = (path / run_folder.SAMPLES).read_bytes()
    write = os.write
    with run_folder.open_run(path, IDENTITY) as run:
        run.start_session({"started": "now"})
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
        with pytest.raises(WriteFailed, match=r"samples\.jsonl cannot be written: No space left on device"):
            run.append(line(1))
        assert (path / run_folder.SAMPLES).read_bytes() == before
        monkeypatch.undo()
        run.append(line(1))
    assert len(run_folder.read_samples(path)) == 2


def test_one_line_is_one_write(tmp_path, monkeypatch):
    writes = []
    write = os.write
    path = make(tmp_path, [])
    with run_folder.open_run(path, IDENTITY) as run:
        run.start_session({"started": "now"})
        monkeypatch.setattr(os, "write", lambda file, data: writes.append(data) or write(file, data))
        run.append(line(0, text="x" * 1_000_000))
    assert [data.count(b"\n") for data in writes if data.startswith(b'{"task"')] == [1]
    assert writes[-1].endswith(b"}\n")


def test_another_library_version_warns(tmp_path):
    make(tmp_path, [line(0)])
    path = folder_for(tmp_path)
    with run_folder.open_run(path, IDENTITY) as run:
        changes = run.start_session({"started": "later", "torch": "3"})
        run.append(line(1))
    assert len(changes) == 1
    assert "torch 2" in changes[0]
    assert changes[0].endswith("these with 3.")
    assert [one["session"] for one in run_folder.read_samples(path).values()] == [0, 1]
    assert [one["torch"] for one in run_folder.read_run(path)["sessions"]] == ["2", "3"]


def _hold(path, held, release):
    with run_folder.open_run(path, IDENTITY):
        held.set()
        release.wait(30)


def test_a_second_process_is_refused_while_the_first_writes(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    path = folder_for(tmp_path)
    process = context.Process(target=_hold, args=(path, held, release))
    process.start()
    try:
        assert held.wait(60)
        with (
            pytest.raises(UserError, match="Another run is writing to") as refusal,
            run_folder.open_run(path, IDENTITY),
        ):
            pass
        assert str(path) in str(refusal.value)
    finally:
        release.set()
        process.join(30)
    with run_folder.open_run(path, IDENTITY):
        pass


def _append_many(path, start):
    done = 0
    while done < 20:
        try:
            with run_folder.open_run(path, IDENTITY) as run:
                run.start_session({"started": "now"})
                for doc_id in range(start + done, start + done + 5):
                    run.append(line(doc_id))
                done += 5
        except UserError:
            continue


def test_two_processes_that_take_turns_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    path = folder_for(tmp_path)
    processes = [context.Process(target=_append_many, args=(path, start)) for start in (0, 100)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert {key[1] for key in run_folder.read_samples(path)} == {*range(20), *range(100, 120)}


def test_json_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "summary.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert json.loads(file.read_text()) == {"a": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["summary.json"]


def test_what_a_killed_process_left_half_written_is_cleared_away(tmp_path):
    path = make(tmp_path, [line(0)])
    (path / ".summary.json-abc").write_text('{"half')
    make(tmp_path, [line(1)])
    assert sorted(one.name for one in path.iterdir()) == [".lock", "run.json", "samples.jsonl"]


def test_token_ids_are_packed_and_unpacked():
    ids = [0, 1, 127, 50_000, 4_000_000_000]
    packed = run_folder.pack_ids(ids)
    assert run_folder.prompt_ids({"prompt_ids": packed}) == tuple(ids)
    assert run_folder.prompt_ids({"prompt_ids": None}) is None
    assert run_folder.hash_ids(ids) == run_folder.hash_ids(tuple(ids)) != run_folder.hash_ids(ids[::-1])


def test_read_back_it_names_the_protocol_and_what_differs_from_it(tmp_path):
    protocol = IDENTITY["protocol"] | {"name": "kvpop", "temperature": 0.6, "differs": ["question", "temperature"]}
    make(tmp_path, [line(0, repeat=3, thinking="closed")], IDENTITY | {"protocol": protocol})
    (row,) = read_results(tmp_path).to_dict("records")
    assert (row["protocol"], row["differs"], row["temperature"]) == ("kvpop", "question, temperature", 0.6)
    assert (row["repeat"], row["thinking"]) == (3, "closed")
    assert "name" not in row


def test_read_back_no_folder_of_others_is_taken(tmp_path):
    with pytest.raises(UserError, match="There is no folder"):
        read_results(tmp_path / "nowhere")
    with pytest.raises(UserError, match="There are no results in"):
        read_results(tmp_path)
    (tmp_path / "run.json").write_text('{"lr": 0.1}')
    with pytest.raises(UserError, match="not the record of an evictbench run"):
        read_results(tmp_path)


def test_results_of_a_newer_evictbench_are_not_guessed_at(tmp_path):
    path = make(tmp_path, [line(0)])
    run = json.loads((path / run_folder.RUN).read_text())
    write_json(path / run_folder.RUN, run | {"results_version": run_folder.RESULTS_VERSION + 1})
    with pytest.raises(UserError, match="newer evictbench"):
        run_folder.read_run(path)


def test_a_root_may_be_new_empty_or_ours(tmp_path):
    run_folder.check_root(tmp_path / "a" / "b")
    (tmp_path / "empty").mkdir()
    run_folder.check_root(tmp_path / "empty")
    (tmp_path / "begun" / "toy" / "tiny").mkdir(parents=True)
    run_folder.check_root(tmp_path / "begun")
    make(tmp_path / "ours", [line(0)])
    (tmp_path / "ours" / "notes.md").write_text("mine")
    run_folder.check_root(tmp_path / "ours")


def test_a_root_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("dear reader")
    with pytest.raises(UserError, match=r"not a folder of evictbench results \(it holds thesis.tex\)"):
        run_folder.check_root(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        run_folder.check_root(tmp_path / "thesis.tex")
    with pytest.raises(UserError, match="is a file"):
        run_folder.check_root(tmp_path / "thesis.tex" / "runs")


def test_a_cell_folder_that_is_not_ours_is_refused(tmp_path):
    path = folder_for(tmp_path)
    path.mkdir(parents=True)
    (path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="not one of ours"), run_folder.open_run(path, IDENTITY):
        pass
    (path / "run.json").write_text("{}")
    with pytest.raises(UserError, match="not the record of an evictbench run"), run_folder.open_run(path, IDENTITY):
        pass
