"""Data as people have it: every layout of every suite is found, and the same documents have the same hash in all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from evictbench.errors import UserError
from evictbench.suite.datasets import Dataset, Layout, Unavailable, content_hash, incomplete, load
from evictbench.suites.aime.problems import DATASETS as AIME
from evictbench.suites.bbh.prepare import DATASETS as BBH
from evictbench.suites.bbh.prompts import FOLDERS as PROMPT_FOLDERS
from evictbench.suites.gsm8k.prepare import DATASET as GSM8K
from evictbench.suites.hmmt.problems import DATASETS as HMMT
from evictbench.suites.longbench.prepare import DATASETS as LONGBENCH
from evictbench.suites.math500.problems import DATASET as MATH500

Records = list[dict[str, Any]]

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SUMS: Records = [{"question": f"What is {n} and {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in range(4)]
ROOTS: Records = [
    {"problem": f"Root of {n * n}?", "answer": f"{n}", "subject": "Algebra", "level": 1, "unique_id": f"test/{n}.json"}
    for n in range(4)
]
EXAMS: dict[str, Records] = {
    year: [{"id": n, "problem": f"In {year}, {n}?", "answer": str(n), "year": year} for n in range(4)]
    for year in ("2024", "2025")
}
TOURNAMENT: Records = [
    {"problem_idx": n, "problem": f"Halve {n}.", "answer": f"\\frac{{{n}}}{{2}}", "problem_type": ["Algebra"]}
    for n in range(4)
]
ROADS: Records = [{"input": f"Turn {n} times.", "target": "Yes"} for n in range(4)]
PAPERS: Records = [
    {"input": f"Who {n}?", "context": "Long.", "answers": ["Me", "I"], "length": 2, "all_classes": None, "_id": f"{n}"}
    for n in range(4)
]

CASES: dict[str, tuple[Dataset, Records, tuple[str, ...]]] = {
    "gsm8k": (
        GSM8K,
        SUMS,
        (
            "test.jsonl",
            "gsm8k/test.jsonl",
            "gsm8k/main/test-00000-of-00001.parquet",
            "main/test-00000-of-00001.parquet",
            "grade_school_math/data/test.jsonl",
            "grade-school-math/grade_school_math/data/test.jsonl",
            f"datasets--openai--gsm8k/snapshots/{COMMIT}/main/test-00000-of-00001.parquet",
            f"hub/datasets--openai--gsm8k/snapshots/{COMMIT}/main/test-00000-of-00001.parquet",
        ),
    ),
    "math500": (
        MATH500,
        ROOTS,
        (
            "math500.jsonl",
            "MATH500.jsonl",
            "test.jsonl",
            "test-00000-of-00001.parquet",
            "math500/test-00000-of-00001.parquet",
            "math_splits/test.jsonl",
            "prm800k/math_splits/test.jsonl",
            "prm800k/prm800k/math_splits/test.jsonl",
            "HuggingFaceH4/MATH-500/test.jsonl",
            f"datasets--HuggingFaceH4--MATH-500/snapshots/{COMMIT}/test.jsonl",
            f"hub/datasets--HuggingFaceH4--MATH-500/snapshots/{COMMIT}/default/test/0000.parquet",
        ),
    ),
    "aime24": (
        AIME["aime24"],
        EXAMS["2024"],
        (
            "aime24.jsonl",
            "aime2024.jsonl",
            "aime_2024.json",
            "test2024.jsonl",
            "aime/test2024.jsonl",
            "eval/data/aime/test2024.jsonl",
            "AIME-Preview/eval/data/aime/test2024.jsonl",
            "data/train-00000-of-00001.parquet",
            "aime_2024/data/train-00000-of-00001.parquet",
            f"datasets--HuggingFaceH4--aime_2024/snapshots/{COMMIT}/data/train-00000-of-00001.parquet",
            "AIME_2024/aime_2024_problems.parquet",
        ),
    ),
    "aime25": (
        AIME["aime25"],
        EXAMS["2025"],
        (
            "aime25.jsonl",
            "aime2025.jsonl",
            "aime_2025.json",
            "aime2025-I.jsonl + aime2025-II.jsonl",
            "AIME2025/aime2025-I.jsonl + AIME2025/aime2025-II.jsonl",
            "test2025-I.jsonl + test2025-II.jsonl",
            "eval/data/aime/test2025-I.jsonl + eval/data/aime/test2025-II.jsonl",
            "data/train-00000-of-00001.parquet",
            f"datasets--math-ai--aime25/snapshots/{COMMIT}/test.jsonl",
            "aime25/test.jsonl",
        ),
    ),
    "hmmt_feb25": (
        HMMT["hmmt_feb25"],
        TOURNAMENT,
        (
            "hmmt_feb25.jsonl",
            "hmmt/hmmt_feb25.parquet",
            "hmmt_feb_2025.jsonl",
            "hmmt/hmmt_feb2025.json",
            "hmmt_feb_2025/hmmt_feb_2025.jsonl",
            "hmmt_feb25/test.jsonl",
            "hmmt_feb_2025/data/train-00000-of-00001.parquet",
            f"datasets--MathArena--hmmt_feb_2025/snapshots/{COMMIT}/data/train-00000-of-00001.parquet",
            f"hub/datasets--MathArena--hmmt_feb_2025/snapshots/{COMMIT}/default/train/0000.parquet",
        ),
    ),
    "hmmt_nov25": (
        HMMT["hmmt_nov25"],
        TOURNAMENT,
        (
            "hmmt_nov25.json",
            "hmmt/hmmt_nov25.jsonl",
            "MathArena/hmmt_nov_2025/data/train-00000-of-00001.parquet",
        ),
    ),
    "navigate": (
        BBH["navigate"],
        ROADS,
        (
            "navigate.json",
            "bbh/navigate.json",
            "bbh/bbh/navigate.json",
            "BIG-Bench-Hard/bbh/navigate.json",
            "BIG-Bench-Hard-main/bbh/navigate.json",
            f"datasets--lukaemon--bbh/snapshots/{COMMIT}/navigate/test-00000-of-00001.parquet",
        ),
    ),
    "qasper": (
        LONGBENCH["qasper"],
        PAPERS,
        (
            "qasper.jsonl",
            "longbench/qasper.jsonl",
            "LongBench/qasper.jsonl",
            "LongBench/data/qasper.jsonl",
            "LongBench/LongBench/data/qasper.jsonl",
            "data.zip/data/qasper.jsonl",
            "longbench/data.zip/data/qasper.jsonl",
            "LongBench/data.zip/data/qasper.jsonl",
            "data.zip/qasper.jsonl",
            "qasper.parquet",
            "qasper/test-00000-of-00001.parquet",
            "LongBench/qasper/test-00000-of-00001.parquet",
            f"datasets--THUDM--LongBench/snapshots/{COMMIT}/data.zip/data/qasper.jsonl",
        ),
    ),
}


def write(path: Path, records: Records) -> None:
    """Write records as their file's name says; a path through .zip is a member of an archive."""
    archive, zipped, member = str(path).partition(".zip/")
    if zipped:
        Path(f"{archive}.zip").parent.mkdir(parents=True, exist_ok=True)
        with ZipFile(f"{archive}.zip", "a") as opened:
            opened.writestr(member, "".join(f"{json.dumps(record)}\n" for record in records))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps({"canary": "none", "examples": records}))
    else:
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.mark.parametrize(("name", "files"), [(name, files) for name, case in CASES.items() for files in case[2]])
def test_a_layout_is_found_and_its_documents_have_the_same_hash(tmp_path: Path, name: str, files: str) -> None:
    dataset, records, _ = CASES[name]
    parts = files.split(" + ")
    size = len(records) // len(parts)
    for number, file in enumerate(parts):
        write(tmp_path / file, records[number * size : (number + 1) * size])
    loaded = load(dataset, tmp_path)
    assert loaded.records == records
    assert loaded.origin == files
    assert loaded.sha256 == content_hash(records)
    for other, (another, _, layouts) in CASES.items():
        if files not in layouts and other != name:
            with pytest.raises(Unavailable):
                load(another, tmp_path)


@pytest.mark.parametrize(
    ("name", "inside", "file"),
    [
        ("math500", f"datasets--HuggingFaceH4--MATH-500/snapshots/{COMMIT}", "test.jsonl"),
        ("math500", "datasets--HuggingFaceH4--MATH-500/snapshots", f"{COMMIT}/test.jsonl"),
        ("math500", "datasets--HuggingFaceH4--MATH-500", f"snapshots/{COMMIT}/test.jsonl"),
        ("aime25", f"datasets--math-ai--aime25/snapshots/{COMMIT}", "test.jsonl"),
        ("aime24", "aime_2024", "data/train-00000-of-00001.parquet"),
        ("hmmt_nov25", "hmmt_nov_2025", "data/train-00000-of-00001.parquet"),
        ("gsm8k", f"datasets--openai--gsm8k/snapshots/{COMMIT}", "main/test-00000-of-00001.parquet"),
        ("navigate", "BIG-Bench-Hard", "bbh/navigate.json"),
        ("qasper", "LongBench", "data.zip/data/qasper.jsonl"),
    ],
)
def test_the_folder_may_be_the_clone_or_the_snapshot_itself(tmp_path: Path, name: str, inside: str, file: str) -> None:
    dataset, records, _ = CASES[name]
    write(tmp_path / inside / file, records)
    assert load(dataset, tmp_path / inside).records == records


def test_of_several_snapshots_the_pinned_one_is_taken_then_the_main_branch(tmp_path: Path) -> None:
    cached = tmp_path / "datasets--HuggingFaceH4--MATH-500"
    for number, commit in enumerate(("a" * 40, "b" * 40, str(MATH500.revision))):
        blob = cached / "blobs" / commit
        write(blob, ROOTS[: number + 1])
        (cached / "snapshots" / commit).mkdir(parents=True)
        os.symlink(blob, cached / "snapshots" / commit / "test.jsonl")
    assert len(load(MATH500, tmp_path).records) == 3
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("b" * 40)
    other = replace(MATH500, revision=None)
    assert len(load(other, tmp_path).records) == 2
    (cached / "refs" / "main").unlink()
    first = sorted(path.name for path in (cached / "snapshots").iterdir())[0]
    assert first in load(other, tmp_path).origin


def test_parts_of_a_table_are_read_in_order(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / "qasper" / f"test-0000{number}-of-00004.parquet", PAPERS[number : number + 1])
    loaded = load(LONGBENCH["qasper"], tmp_path)
    assert (loaded.records, loaded.sha256) == (PAPERS, content_hash(PAPERS))


def test_a_whole_layout_is_taken_before_half_of_another(tmp_path: Path) -> None:
    exams = EXAMS["2025"]
    write(tmp_path / "aime2025-I.jsonl", exams[:2])
    assert load(AIME["aime25"], tmp_path).records == exams[:2]
    write(tmp_path / "aime2025.jsonl", exams)
    assert load(AIME["aime25"], tmp_path).origin == "aime2025.jsonl"


WRONG: list[tuple[str, Callable[[Path], object], str]] = [
    ("data.zip", lambda file: file.write_bytes(b"PK\x03\x04nothing"), r"data\.zip is not a \.zip archive that can be"),
    (
        "data.zip",
        lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        r"data\.zip is a pointer of Git LFS and not the file itself: fetch it with git lfs pull\.",
    ),
    (
        "qasper.jsonl",
        lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        r"qasper\.jsonl is a pointer of Git LFS",
    ),
    ("qasper.jsonl", lambda file: file.write_text('{"a":' * 200_000), r"qasper\.jsonl: line 1 is not valid JSON: "),
    ("qasper.json", lambda file: file.write_text("[" * 200_000), r"qasper\.json is not valid JSON: "),
]


@pytest.mark.parametrize(("name", "make", "sentence"), WRONG)
def test_a_file_that_cannot_be_read_is_a_sentence(
    tmp_path: Path, name: str, make: Callable[[Path], object], sentence: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(UserError, match=sentence) as raised:
        load(LONGBENCH["qasper"], tmp_path)
    assert "\n" not in str(raised.value)


def test_an_archive_is_never_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "data"
    inside.mkdir()
    with ZipFile(inside / "data.zip", "w") as archive:
        for member in ("../escaped.jsonl", "/tmp/escaped.jsonl", "data/qasper.jsonl"):
            archive.writestr(member, "".join(f"{json.dumps(record)}\n" for record in PAPERS))
    before = sorted(tmp_path.rglob("*"))
    assert load(LONGBENCH["qasper"], inside).records == PAPERS
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr("evictbench.suite.records.LARGEST_MEMBER", 10)
    with pytest.raises(UserError, match=r"data\.zip/data/qasper\.jsonl has more than 10 bytes when it is unpacked"):
        load(LONGBENCH["qasper"], inside)


def test_a_damaged_member_is_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "data.zip" / "data" / "qasper.jsonl", PAPERS)
    content = bytearray((tmp_path / "data.zip").read_bytes())
    content[80] ^= 0xFF
    (tmp_path / "data.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"data\.zip is not a \.zip archive that can be read: Bad CRC"):
        load(LONGBENCH["qasper"], tmp_path)


HALF = "15 of the 30 documents of AIME 2025 are missing: aime25.jsonl has 15, and the score is over those."


@pytest.mark.parametrize(
    ("found", "limit", "sentence"),
    [
        (30, None, None),
        (
            15,
            None,
            "15 of the 30 documents of AIME 2025 are missing: aime25.jsonl has 15, and the score is over those.",
        ),
        (15, 20, "15 of the 30 documents of AIME 2025 are missing: aime25.jsonl has 15, and the score is over those."),
        (15, 15, None),
        (15, 4, None),
        (30, 100, None),
        (45, None, "aime25.jsonl has 45 documents, and AIME 2025 has 30: these are not the usual ones."),
    ],
)
def test_missing_documents_are_counted(tmp_path: Path, found: int, limit: int | None, sentence: str | None) -> None:
    write(tmp_path / "aime25.jsonl", [{"problem": f"{n}?", "answer": n} for n in range(found)])
    dataset = AIME["aime25"]
    assert incomplete(dataset, load(dataset, tmp_path), limit) == sentence


def test_the_known_numbers_of_documents() -> None:
    """LongBench's paper: 4,750 records; its table 8: 224, 150, 294 and ten times 300. BBH: 6,511 questions."""
    records = {name: dataset.documents or 0 for name, dataset in LONGBENCH.items()}
    assert sum(count for name, count in records.items() if not name.endswith("_e")) == 4750
    assert sum(count for name, count in records.items() if name.endswith("_e")) == 224 + 150 + 294 + 10 * 300
    assert sum(dataset.documents or 0 for dataset in BBH.values()) == 6511
    assert (GSM8K.documents, MATH500.documents, {d.documents for d in (*AIME.values(), *HMMT.values())}) == (
        *(1319, 500),
        {30},
    )


def test_names_that_do_not_say_whose_they_are_need_signs() -> None:
    generic = {"test.jsonl", "test-*-of-*.parquet", "data/train-*-of-*.parquet", "data/test-*-of-*.parquet"}
    for dataset in (GSM8K, MATH500, *AIME.values(), *HMMT.values()):
        for layout in dataset.layouts:
            if generic & {*layout.paths}:
                assert layout.signs, (dataset.name, layout)
    assert Layout(("x",), {"year": "^2024$"}).fits({"year": 2024})
    assert not Layout(("x",), {"year": "^2024$"}).fits({"year": "2025"})
    assert not Layout(("x",), {"year": ""}).fits({})


def test_bbh_prompts_lie_beside_the_questions_in_a_clone() -> None:
    assert {"BIG-Bench-Hard/cot-prompts", "bbh/cot-prompts", "cot-prompts"} <= {*PROMPT_FOLDERS}
