"""The suite through the ordinary run: metrics in lines and summary, no text graded, a larger limit extends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evictbench.evaluation.run import run
from evictbench.evaluation.settings import RunSettings
from evictbench.store import run_folder

WORDS = (
    *("the", "river", "ran", "past", "seven", "quiet", "houses", "and", "under", "one", "old"),
    *("bridge", "before", "it", "came", "to", "the", "wide", "grey", "harbour"),
)


class Quiet:
    """Watches a run and says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@pytest.fixture
def measured(tmp_path: Path) -> Any:
    book = tmp_path / "book.txt"
    book.write_text(" ".join(f"{word} {number}" for number in range(30) for word in WORDS))

    def measure(policy: str, budget: str | None, limit: int = 2) -> Any:
        settings = RunSettings(
            policy=policy,
            budget=budget,
            suite="fidelity",
            tasks="text",
            haystack=book,
            context=96,
            max_new_tokens="12",
            limit=limit,
            device="cpu",
            out=tmp_path / "runs",
        )
        outcome = run(settings, Quiet())
        found = run_folder.read_samples(outcome.plan.folder)
        return outcome, sorted(found.values(), key=lambda line: line["doc_id"])

    return measure


def test_a_run_measures(measured: Any) -> None:
    outcome, lines = measured("tova", "24")
    assert outcome.summary["mean"]["samples"] == len(lines) == 2
    for line in lines:
        assert line["score"] == line["metrics"]["agreement"]
        assert line["metrics"]["kl"] > 1e-3
        assert {"kl", "agreement", "ppl_ratio", "nll", "nll_full", "kl_q1", "kl_q4"} <= line["metrics"].keys()
        assert line["output_tokens"] == 12
        assert line["occupancy_max"] == 24
        assert not line["truncated"]
    more, extended = measured("tova", "24", limit=3)
    assert more.plan.folder == outcome.plan.folder
    assert extended[:2] == lines
    assert len(extended) == 3


def test_the_full_cache_is_its_own_measure(measured: Any) -> None:
    _, lines = measured("full", None)
    for line in lines:
        assert line["score"] == 1.0
        assert line["metrics"]["kl"] < 1e-6
