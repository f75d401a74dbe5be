"""Invented questions in BBH's format, and tasks made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suites.bbh import SUITE

QUESTIONS = {
    "boolean_expressions": [("not not False is", "False"), ("True and True is", "True")],
    "object_counting": [("I have two drums and a fife. How many instruments do I have?", "3")],
    "snarks": [("Which statement is sarcastic?\nOptions:\n(A) Lovely rain\n(B) Lovely sun", "(A)")],
}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "bbh"
    folder.mkdir()
    for subject, pairs in QUESTIONS.items():
        examples = [{"input": question, "target": target} for question, target in pairs]
        (folder / f"{subject}.json").write_text(json.dumps({"canary": "none", "examples": examples}))
    return tmp_path


@pytest.fixture
def prepare(data_dir):
    """`prepare(*tasks, data_dir=...)`: no tokenizer is needed, since prompts are not cut."""

    def prepare(*tasks: str, data_dir: Path = data_dir) -> PreparedSuite:
        return SUITE.prepare(SuiteRequest(tokenizer=None, chat=False, tasks=tasks or None, data_dir=data_dir))

    return prepare
