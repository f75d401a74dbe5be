"""The eight tasks whose real records lie beside the repository; skipped where they do not."""

from __future__ import annotations

import json

import pytest

from evictbench.evaluation import tasks
from evictbench.suites.longbench import SUITE
from evictbench.suites.longbench.tasks import OFFICIAL, TASKS
from evictbench.suites.longbench.templates import TEMPLATES

EIGHT = (
    "qasper",
    "hotpotqa",
    "2wikimqa",
    "musique",
    "gov_report",
    "qmsum",
    "passage_count",
    "passage_retrieval_en",
)


@pytest.fixture(scope="module")
def folder(shared):
    return shared / "data"


def test_templates_and_limits_are_the_official_files(folder):
    assert json.loads((folder / "longbench" / "dataset2prompt.json").read_text()) == TEMPLATES
    limits = json.loads((folder / "longbench" / "dataset2maxlen.json").read_text())
    assert limits == {name: task.answer_tokens for name, task in OFFICIAL.items()}


@pytest.mark.parametrize("window", [None, 4096])
def test_real_records(folder, prepare, tokenizer, window):
    prepared = prepare(data_dir=folder, window=window, limit=4)
    assert set(prepared.tasks) == set(EIGHT)
    assert len(prepared.skipped) == 8
    loaded = tasks.load_tasks(SUITE, prepared)
    cut = 0
    for name, task in loaded.items():
        for prompt in tasks.prompts(task, tokenizer, chat=True, context_field="context", limit=4):
            doc = task.task_docs[prompt.doc_id]
            assert doc["input"].startswith(doc["context"])
            assert doc["input"].endswith(TEMPLATES[name].rsplit("}", 1)[1])
            assert prompt.border is not None
            assert window is None or len(prompt.ids) <= window - TASKS[name].answer_tokens
            answer = max(doc["answers"], key=len)
            assert all(isinstance(one, str) and len(one) > 0 for one in doc["answers"])
            assert tasks.score(task, prompt.doc_id, answer).score == pytest.approx(1.0, abs=1e-6)
            assert tasks.score(task, prompt.doc_id, "Ask me another.").score < 0.3
            cut += doc["cut"]
    assert (cut > 0) == (window is not None)
