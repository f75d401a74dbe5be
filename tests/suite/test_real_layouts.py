"""Real files in the layouts in which people have them: found, whole, and hashed as before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from zipfile import ZipFile

import pytest

from evictbench import registry
from evictbench.suite.datasets import Unavailable, content_hash, load, read
from evictbench.suites.bbh.prepare import DATASETS as BBH
from evictbench.suites.bbh.prompts import from_file, shots
from evictbench.suites.gsm8k.prepare import DATASET as GSM8K
from evictbench.suites.longbench.prepare import DATASETS as LONGBENCH
from evictbench.suites.math500.problems import DATASET as MATH500
from evictbench.suites.ruler.qa_data import find


def test_the_parent_of_a_clone_of_bbh(shared: Path, tmp_path: Path) -> None:
    os.symlink(shared / "data" / "bbh", tmp_path / "BIG-Bench-Hard")
    for subject, dataset in BBH.items():
        loaded = load(dataset, tmp_path)
        assert len(loaded.records) == dataset.documents
        assert loaded.origin == f"BIG-Bench-Hard/bbh/{subject}.json"
        assert loaded.sha256 == load(dataset, shared / "data").sha256
    file = shared / "data" / "bbh" / "cot-prompts" / "navigate.txt"
    assert shots("navigate", tmp_path) == from_file(file)


def test_the_repository_of_gsm8ks_authors(shared: Path, tmp_path: Path) -> None:
    file = tmp_path / "grade_school_math" / "data" / "test.jsonl"
    file.parent.mkdir(parents=True)
    os.symlink(shared / "data" / "gsm8k" / "test.jsonl", file)
    loaded = load(GSM8K, tmp_path)
    assert len(loaded.records) == GSM8K.documents == 1319
    assert loaded.sha256 == load(GSM8K, shared / "data").sha256
    # In a folder that says nothing, GSM8K's test.jsonl is not taken for MATH-500's.
    with pytest.raises(Unavailable):
        load(MATH500, shared / "data" / "gsm8k")


def test_longbench_as_archive_and_as_parquet(shared: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    source = shared / "data" / "longbench" / "qmsum.jsonl"
    dataset = LONGBENCH["qmsum"]
    hashed = load(dataset, shared / "data").sha256
    with ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(source, "data/qmsum.jsonl")
    assert load(dataset, tmp_path).sha256 == hashed
    folder = tmp_path / "other" / "LongBench" / "qmsum"
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(read(source)), folder / "test-00000-of-00001.parquet")
    loaded = load(dataset, tmp_path / "other")
    assert (loaded.origin, loaded.sha256) == ("LongBench/qmsum/test-00000-of-00001.parquet", hashed)
    assert loaded.sha256 == content_hash([json.loads(line) for line in source.read_text().splitlines()])


def test_rulers_questions_where_upstreams_scripts_put_them(shared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "RULER" / "scripts" / "data" / "synthetic" / "json"
    folder.mkdir(parents=True)
    os.symlink(shared / "data" / "ruler" / "squad" / "xquad.en.json", folder / "squad.json")
    os.symlink(shared / "data" / "ruler" / "hotpotqa" / "hotpot_dev_distractor_100.json", folder / "hotpotqa.json")
    for name in ("squad", "hotpotqa"):
        usual, here = find(name, shared / "data"), find(name, tmp_path)
        assert here.questions == usual.questions
        assert here.name.partition(" (")[2] == usual.name.partition(" (")[2]  # counts and hash


def test_what_the_shared_folder_holds(shared: Path) -> None:
    found = {}
    for name in ("bbh", "gsm8k", "longbench", "math500", "aime", "ruler"):
        survey = registry.load_suite(name).survey
        assert survey is not None
        found[name] = sum(data.documents for data in survey(shared / "data"))
    assert found == {"bbh": 6511, "gsm8k": 1319, "longbench": 79, "math500": 0, "aime": 0, "ruler": 1290}
