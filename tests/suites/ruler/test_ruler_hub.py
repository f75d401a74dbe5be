"""The hub: its rows in the formats of the files, and a quick answer where it cannot be reached."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import urllib.error

import pytest

from evictbench.suites.ruler import hub
from evictbench.suites.ruler.qa_data import find

SQUAD_ROWS = [
    {"title": "A", "context": "one two", "question": "first?", "answers": {"text": ["one", "One"]}},
    {"title": "A", "context": "one two", "question": "impossible?", "answers": {"text": []}},
    {"title": "A", "context": "three", "question": "third?", "answers": {"text": ["three"]}},
    {"title": "B", "context": "four", "question": "fourth?", "answers": {"text": ["four"]}},
]
HOTPOTQA_ROWS = [
    {
        "question": "which?",
        "answer": "that",
        "context": {"title": ["T", "U"], "sentences": [["That.", " This."], ["Other."]]},
    }
]


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub._unreachable.cache_clear()
    yield
    hub._unreachable.cache_clear()


def test_rows_become_a_corpus(monkeypatch):
    rows = {hub.SQUAD: SQUAD_ROWS, hub.HOTPOTQA: HOTPOTQA_ROWS}
    monkeypatch.setattr(hub, "_rows", lambda name, split: rows[name])
    squad = find("squad", None)
    assert squad.documents == ("four", "one two", "three")
    assert [(q.text, q.answers, q.documents, q.related) for q in squad.questions] == [
        ("first?", ("one", "One"), (1,), (2,)),
        ("third?", ("three",), (2,), (1,)),
        ("fourth?", ("four",), (0,), ()),
    ]
    assert squad.name.startswith("rajpurkar/squad_v2 (3 questions, 3 documents) sha256:")
    hotpotqa = find("hotpotqa", None)
    assert hotpotqa.documents == ("T\nThat. This.", "U\nOther.")
    assert hotpotqa.questions[0].documents == (0, 1)


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (urllib.error.URLError("no route"), "it cannot be reached (no route)"),
        (urllib.error.HTTPError("u", 503, "", {}, io.BytesIO()), "HTTP 503"),
        (urllib.error.HTTPError("u", 403, "", {}, io.BytesIO()), "HTTP 403"),
        (urllib.error.HTTPError("u", 404, "", {}, io.BytesIO()), None),
        (TimeoutError("timed out"), "it cannot be reached (timed out)"),
    ],
)
def test_reasons(monkeypatch, failure, reason):
    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr("urllib.request.urlopen", fail)
    assert hub._unreachable() == reason


@pytest.mark.usefixtures("online")
def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(hub, "_PATIENCE", -0.8)
    released = threading.Event()
    monkeypatch.setattr(hub, "_probe", lambda endpoint: released.wait(600))
    assert hub.squad().startswith("no answer within")
    assert hub.hotpotqa().startswith("no answer within")
    released.set()


def test_offline_with_an_empty_cache_answers(tmp_path):
    script = "from evictbench.suites.ruler import hub; print(hub.squad()); print(hub.essays())"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    assert run.stdout.splitlines() == [
        "HF_HUB_OFFLINE is set and rajpurkar/squad_v2 is not in the cache",
        "HF_HUB_OFFLINE is set and baber/paul_graham_essays is not in the cache",
    ]
