"""Where RULER's questions and essays are found: as their authors, upstream's scripts and the hub have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evictbench.errors import UserError
from evictbench.suites.ruler import SUITE
from evictbench.suites.ruler.qa_data import find

SQUAD = [
    {"title": "A", "context": "one two", "question": "first?", "answers": {"text": ["one"], "answer_start": [0]}},
    {"title": "A", "context": "three", "question": "second?", "answers": {"text": ["three"], "answer_start": [0]}},
    {"title": "B", "context": "four", "question": "none?", "answers": {"text": [], "answer_start": []}},
]
HOTPOTQA = [
    {"question": "which?", "answer": "that", "context": {"title": ["T", "U"], "sentences": [["That."], ["No."]]}},
]


def articles() -> dict[str, Any]:
    def qa(row: dict[str, Any]) -> dict[str, Any]:
        return {"question": row["question"], "answers": [{"text": text} for text in row["answers"]["text"]]}

    by_title: dict[str, list[dict[str, Any]]] = {}
    for row in SQUAD:
        by_title.setdefault(row["title"], []).append({"context": row["context"], "qas": [qa(row)]})
    return {"data": [{"title": title, "paragraphs": paragraphs} for title, paragraphs in by_title.items()]}


def questions() -> list[dict[str, Any]]:
    return [
        {
            **row,
            "context": [list(pair) for pair in zip(row["context"]["title"], row["context"]["sentences"], strict=True)],
        }
        for row in HOTPOTQA
    ]


def write(file: Path, rows: list[dict[str, Any]], whole: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(whole))


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("squad", "squad/any.json"),
        ("squad", "ruler/squad/any.json"),
        ("squad", "dev-v2.0.json"),
        ("squad", "SQuAD/dev-v1.1.json"),
        ("squad", "json/squad.json"),
        ("squad", "RULER/scripts/data/synthetic/json/squad.json"),
        ("squad", "squad_v2/squad_v2/validation-00000-of-00001.parquet"),
        ("squad", f"datasets--rajpurkar--squad_v2/snapshots/{'a' * 40}/squad_v2/validation-00000-of-00001.parquet"),
        ("hotpotqa", "hotpotqa/any.json"),
        ("hotpotqa", "hotpot_dev_distractor_v1.json"),
        ("hotpotqa", "json/hotpotqa.json"),
        ("hotpotqa", "hotpot_qa/distractor/validation-00000-of-00001.parquet"),
        ("hotpotqa", f"hub/datasets--hotpotqa--hotpot_qa/snapshots/{'a' * 40}/distractor/validation/0000.parquet"),
    ],
)
def test_questions_are_found_and_hashed_alike(tmp_path: Path, dataset: Any, name: str) -> None:
    rows, whole = (SQUAD, articles()) if dataset == "squad" else (HOTPOTQA, questions())
    write(tmp_path / "usual" / dataset / "file.json", rows, whole)
    usual = find(dataset, tmp_path / "usual")
    write(tmp_path / "here" / name, rows, whole)
    here = find(dataset, tmp_path / "here")
    assert (here.documents, here.questions) == (usual.documents, usual.questions)
    assert here.name.partition(" (")[2] == usual.name.partition(" (")[2]
    assert SUITE.survey is not None
    found = {data.name: (data.where, data.documents) for data in SUITE.survey(tmp_path / "here")}
    assert found == {"squad": ("", 0), "hotpotqa": ("", 0)} | {dataset: (name, len(here.questions))}


def test_a_table_of_other_rows_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "distractor" / "validation-00000-of-00001.parquet", [{"question": "q", "answer": "a"}], None)
    with pytest.raises(
        UserError, match=r"validation-00000-of-00001\.parquet has not the fields of hotpotqa on the hub"
    ):
        find("hotpotqa", tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"text": "One. Two is here. Three."}', None),
        ('{"essays": "One."}', "is JSON and has no field text that holds the essays"),
        ('{"text": ', "is not valid JSON"),
    ],
)
def test_upstreams_file_of_essays_is_read_as_text(documents: Any, tmp_path: Path, content: str, sentence: Any) -> None:
    essays = tmp_path / "PaulGrahamEssays.json"
    essays.write_text(content)
    if sentence is not None:
        with pytest.raises(UserError, match=sentence):
            documents("niah_single_2", haystack=essays)
        return
    text = tmp_path / "essays.txt"
    text.write_text(json.loads(content)["text"])
    from_json, from_text = (documents("niah_single_2", haystack=file, limit=1) for file in (essays, text))
    assert from_json == from_text
