"""Invented problems in GSM8K's format, and tasks made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suites.gsm8k import SUITE

PROBLEMS = [
    {
        "question": "A tram has 12 seats and 7 are taken.\nHow many are free?",
        "answer": "12-7=<<12-7=5>>5 seats are free.\n#### 5",
    },
    {
        "question": "A mill grinds 500 sacks a day; and in 4?",
        "answer": "4*500=<<4*500=2000>>2000\n#### 2,000",
    },
    {"question": "It is 7 degrees and gets 10 colder. How warm is it?", "answer": "7-10=-3\n#### -3"},
]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    lines = [json.dumps(problem) for problem in PROBLEMS]
    (tmp_path / "test.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def prepare(data_dir):
    """`prepare(*tasks, data_dir=...)`: no tokenizer is needed, since prompts are not cut."""

    def prepare(*tasks: str, data_dir: Path = data_dir) -> PreparedSuite:
        return SUITE.prepare(SuiteRequest(tokenizer=None, chat=False, tasks=tasks or None, data_dir=data_dir))

    return prepare
