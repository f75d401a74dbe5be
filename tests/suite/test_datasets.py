"""Benchmark records: the formats they come in, where they are looked for, their hash, and what is refused."""

from __future__ import annotations

import copy
import json
import socket
import time
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from evictbench import hub
from evictbench.errors import UserError
from evictbench.suite import datasets
from evictbench.suite.datasets import Dataset, Documents, Unavailable, content_hash, load

RIDDLES = [{"question": "What has keys?", "answer": "a piano"}, {"question": "Et ça ?", "answer": "rien"}]
COMMIT = "0123456789abcdef0123456789abcdef01234567"

riddles = Dataset(
    name="Riddles",
    files=("test.jsonl", "test.json", "test.parquet", "main/test.parquet"),
    folder="riddles",
    hub="sphinx/riddles",
    revision=None,
    config="main",
    split="test",
    fields=("question", "answer"),
)


def write(path: Path, records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records), encoding="utf-8")
    else:
        path.write_text(json.dumps(records), encoding="utf-8")


@pytest.fixture(autouse=True)
def _ask_again():
    datasets._unreachable.cache_clear()
    yield
    datasets._unreachable.cache_clear()


@pytest.mark.parametrize("name", ["test.jsonl", "riddles/test.json", "riddles/test.parquet", "main/test.parquet"])
def test_the_same_records_in_any_format_have_the_same_hash(tmp_path, name):
    write(tmp_path / name, RIDDLES)
    loaded = load(riddles, tmp_path)
    assert loaded.records == RIDDLES
    assert loaded.origin == name
    assert loaded.sha256 == content_hash(RIDDLES)
    assert content_hash([{"answer": "a piano", "question": "What has keys?"}, RIDDLES[1]]) == loaded.sha256
    assert content_hash(RIDDLES[::-1]) != loaded.sha256


@pytest.mark.parametrize("key", ["examples", "data"])
def test_an_object_with_a_list_of_records(tmp_path, key):
    write(tmp_path / "test.json", {"canary": "none", key: RIDDLES})
    assert load(riddles, tmp_path).records == RIDDLES


def test_the_own_folder_and_the_first_name_come_first(tmp_path):
    write(tmp_path / "test.json", RIDDLES[:1])
    write(tmp_path / "test.jsonl", RIDDLES[1:])
    assert load(riddles, tmp_path).records == RIDDLES[1:]
    write(tmp_path / "riddles" / "test.jsonl", RIDDLES)
    assert load(riddles, tmp_path).records == RIDDLES


def test_a_byte_order_mark_and_blank_lines_are_no_records(tmp_path):
    text = "".join(f"\n{json.dumps(record)}\n" for record in RIDDLES)
    (tmp_path / "test.jsonl").write_text(f"{text}\n", encoding="utf-8-sig")
    assert load(riddles, tmp_path).records == RIDDLES


BROKEN = [
    ("test.jsonl", b"", r"test\.jsonl holds no records\."),
    ("test.jsonl", b"\n\n", r"test\.jsonl holds no records\."),
    ("test.json", b"", r"test\.json holds no records\."),
    ("test.json", b"[]", r"test\.json holds no records\."),
    ("test.json", b'{"rows": []}', r"test\.json is neither a list of records nor an object with the list"),
    ("test.json", b'{"examples": {}}', r"test\.json is neither a list of records nor an object with the list"),
    ("test.json", b"[1", r"test\.json is not valid JSON: "),
    ("test.json", b'["What has keys?"]', r"test\.json: record 1 is str, not an object with fields\."),
    ("test.jsonl", b'{"question": "q", "answer": "a"}\n{"quest', r"test\.jsonl: line 2 is not valid JSON: "),
    (
        "test.jsonl",
        b'{"question": "q", "answer": "a"}\n{"question": "q"}',
        r"test\.jsonl: record 2 has no field 'answer'",
    ),
    ("test.jsonl", b'{"question": "q", "answer": null}', r"test\.jsonl: record 1 has no field 'answer'\."),
    ("test.jsonl", b'{"question": "\xff"}', r"test\.jsonl is not UTF-8 text \(byte 14\)\."),
    ("test.parquet", b"PAR0", r"test\.parquet is not a parquet file that can be read: "),
]


@pytest.mark.parametrize(("name", "content", "sentence"), BROKEN)
def test_a_broken_file_is_a_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence) as raised:
        load(riddles, tmp_path)
    assert not isinstance(raised.value, Unavailable)
    assert "\n" not in str(raised.value)


def test_nothing_in_the_folder_names_what_was_looked_for(tmp_path):
    with pytest.raises(Unavailable) as raised:
        load(riddles, tmp_path)
    assert str(raised.value) == (
        f"The folder {tmp_path} has no Riddles data: looked for test.jsonl or test.json or test.parquet or "
        "main/test.parquet, there and in riddles/."
    )
    with pytest.raises(UserError, match=r"The data folder .*nowhere does not exist"):
        load(riddles, tmp_path / "nowhere")


def test_documents_are_made_when_asked_for_and_never_copied():
    made = []

    def make(index, record):
        made.append(index)
        return {"index": index, **record}

    documents = Documents(RIDDLES, make)
    assert len(documents) == 2
    assert not made
    assert documents[1]["answer"] == documents[-1]["answer"] == "rien"
    assert [doc["index"] for doc in documents] == [doc["index"] for doc in documents[:5]] == [0, 1]
    assert list(documents.features) == ["index", "question", "answer"]
    assert copy.deepcopy({"docs": documents})["docs"] is documents
    with pytest.raises(IndexError):
        documents[2]


@pytest.fixture
def _no_hub(monkeypatch):
    monkeypatch.setattr(hub, "why_unreachable", lambda timeout=5.0: "no answer within 5 seconds")


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """`cached(records)`: what `datasets` leaves behind of a commit of the hub's repository."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)

    def cached(records) -> None:
        folder = tmp_path / "sphinx___riddles" / "main" / "0.0.0" / COMMIT
        folder.mkdir(parents=True)
        features = datasets.Dataset.from_list(records).features
        with ArrowWriter(path=str(folder / "riddles-test.arrow"), features=features) as writer:
            for record in records:
                writer.write(record)
            writer.finalize()
        splits = datasets.SplitDict(dataset_name="riddles")
        splits.add(datasets.SplitInfo("test", num_examples=len(records)))
        info = datasets.DatasetInfo(
            features=features,
            builder_name="parquet",
            dataset_name="riddles",
            config_name="main",
            version="0.0.0",
            splits=splits,
        )
        info.write_to_directory(str(folder))

    return cached


@pytest.mark.usefixtures("_no_hub")
def test_a_hub_out_of_reach_is_not_asked(cached, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was tried"))
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("another try was waited for"))
    with pytest.raises(Unavailable) as raised:
        load(riddles, None)
    assert str(raised.value) == (
        "Riddles comes from the hub (sphinx/riddles main), which did not give it (no answer within 5 seconds, and it "
        "is not in the local cache); fetch it where there is a network, or give a folder that holds test.jsonl or "
        "test.json or test.parquet or main/test.parquet with --data-dir."
    )


@pytest.mark.usefixtures("_no_hub")
def test_what_the_hub_gave_before_is_read_from_its_cache(cached):
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    cached(RIDDLES)
    loaded = load(riddles, None)
    assert loaded.records == RIDDLES
    assert loaded.origin == f"sphinx/riddles@{COMMIT}"
    assert loaded.sha256 == content_hash(RIDDLES)
    assert before == datasets.config.HF_HUB_OFFLINE


@pytest.mark.usefixtures("_no_hub")
def test_records_of_the_hub_are_checked_and_may_be_pinned(cached, tmp_path):
    cached(RIDDLES)
    assert load(replace(riddles, sha256=content_hash(RIDDLES)), None).records == RIDDLES
    pinned = replace(riddles, sha256="0" * 64)
    with pytest.raises(UserError, match=rf"sphinx/riddles@{COMMIT} holds other records than the Riddles that this"):
        load(pinned, None)
    with pytest.raises(UserError, match=rf"sphinx/riddles@{COMMIT}: record 1 has no field 'hint'\."):
        load(replace(riddles, fields=("hint",)), None)
    write(tmp_path / "own" / "test.jsonl", RIDDLES[:1])
    assert load(pinned, tmp_path / "own").records == RIDDLES[:1]


def test_one_file_of_a_repository_and_one_member_of_an_archive(monkeypatch, tmp_path):
    import huggingface_hub

    snapshot = tmp_path / "snapshots" / COMMIT
    write(snapshot / "inner" / "test.jsonl", RIDDLES)
    with ZipFile(snapshot / "data.zip", "w") as archive:
        archive.write(snapshot / "inner" / "test.jsonl", "folder/test.jsonl")
    asked = []

    def download(repo, name, **how):
        asked.append((repo, name, how))
        return str(snapshot / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(hub, "why_unreachable", lambda timeout=5.0: None)
    for file in ("inner/test.jsonl", "data.zip/folder/test.jsonl"):
        loaded = load(replace(riddles, hub_file=file, revision="v1"), None)
        assert (loaded.records, loaded.origin) == (RIDDLES, f"sphinx/riddles@{COMMIT}")
    how = {"repo_type": "dataset", "revision": "v1", "local_files_only": False}
    assert asked == [("sphinx/riddles", "inner/test.jsonl", how), ("sphinx/riddles", "data.zip", how)]
    with pytest.raises(Unavailable, match=r"Riddles comes from the hub .*There is no item named"):
        load(replace(riddles, hub_file="data.zip/folder/train.jsonl"), None)
