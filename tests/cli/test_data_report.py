"""`evictbench doctor --data-dir`: what a folder holds, and what is missing of how many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evictbench.cli import data_report
from evictbench.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    half = [{"question": f"{n}?", "answer": str(n)} for n in range(15)]
    (tmp_path / "aime2025-I.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in half))
    (tmp_path / "MATH500.jsonl").write_text('{"problem": "1?", "answer": "1"}\n' * 500)
    (tmp_path / "bbh").mkdir()
    (tmp_path / "bbh" / "navigate.json").write_text("[")
    return tmp_path


def test_json_says_where_how_many_and_of_how_many(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_report.show(data_report.look(folder), as_json=True)
    entries = {entry["suite"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert set(entries) >= {"aime", "bbh", "gsm8k", "longbench", "math500", "ruler"}
    assert "fidelity" not in entries
    assert (entries["aime"]["documents"], entries["aime"]["known"]) == (15, 60)
    assert entries["aime"]["data"] == [
        {"name": "aime24", "where": None, "documents": 0, "known": 30, "missing": 30, "problem": None},
        {
            "name": "aime25",
            "where": "aime2025-I.jsonl",
            "documents": 15,
            "known": 30,
            "missing": 15,
            "problem": None,
        },
    ]
    (whole,) = entries["math500"]["data"]
    assert (whole["where"], whole["documents"], whole["missing"]) == ("MATH500.jsonl", 500, 0)
    navigate = next(found for found in entries["bbh"]["data"] if found["name"] == "navigate")
    assert navigate["documents"] == 0
    assert "navigate.json is not valid JSON" in navigate["problem"]


def test_the_table_names_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_report.show(data_report.look(folder), as_json=False)
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert lines["aime"] == ["aime", "1", "of", "2", "15", "of", "60", "aime2025-I.jsonl"]
    assert lines["math500"] == ["math500", "1", "of", "1", "500", "of", "500", "MATH500.jsonl"]
    assert "aime: not whole: aime25 has 15 of 30." in shown
    assert "aime: not there: aime24." in shown
    assert "gsm8k: nothing of it is there." in shown
    assert "math500:" not in shown
    data_report.show(data_report.look(folder), as_json=False, quiet=True)
    assert "math500" not in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no folder .*nowhere \(--data-dir\)\."):
        data_report.look(tmp_path / "nowhere")
