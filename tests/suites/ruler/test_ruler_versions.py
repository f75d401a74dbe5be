"""Version 2 has upstream's corrections of vt and fwe; version 1 makes the prompts of old results."""

from __future__ import annotations

from typing import Any

import pytest

from evictbench.errors import UserError
from evictbench.evaluation.checks import check
from evictbench.evaluation.settings import RunSettings
from evictbench.evaluation.tasks import load_tasks, version_of
from evictbench.suites.ruler import SUITE
from evictbench.suites.ruler.tasks import TASKS, VERSION, VERSIONS


def test_the_default_is_the_newest_version() -> None:
    assert SUITE.versions == tuple(VERSIONS) == ("2", "1")
    assert SUITE.versions[0] == str(VERSION)


@pytest.mark.parametrize(
    ("version", "named", "data"),
    [
        (None, "2", "generator version 2, NVIDIA/RULER at c3f5e3b"),
        ("2", "2", "generator version 2, NVIDIA/RULER at c3f5e3b"),
        ("1", "1", "generator version 1"),
    ],
)
def test_a_result_names_the_version(prepare: Any, version: str | None, named: str, data: str) -> None:
    prepared = prepare("vt", "niah_single_1", version=version)
    assert prepared.data["ruler"] == data
    assert {version_of(task) for task in load_tasks(SUITE, prepared).values()} == {named}


def test_the_versions_differ_in_vt_alone(documents: Any) -> None:
    for name in TASKS:
        old, new = (documents(name, context=1024, limit=1, version=version) for version in ("1", "2"))
        if name != "vt":
            assert old == new, name
            continue
        for before, after in zip(old, new, strict=True):
            assert "5 variables are assgined the value" in before["gen_prefix"]
            assert before["gen_prefix"].replace("assgined", "assigned") == after["gen_prefix"]
            assert before["outputs"] == after["outputs"]
            assert "assgined" in before["context"]  # the worked example
            assert "assgined" not in after["input"] + after["gen_prefix"]


@pytest.mark.parametrize(("version", "words"), [("1", 1024 // 50), ("2", (1024 - 50) // 50)])
def test_fwe_has_a_word_for_each_50_tokens(prepare: Any, version: str, words: int) -> None:
    samples = prepare("fwe", context=1024, version=version).metadata["ruler_samples"]["fwe"]
    assert len(samples._maker.shares) == words


@pytest.mark.parametrize(
    ("suite", "version", "sentence"),
    [
        ("ruler", "3", "version"),
        ("gsm8k", "1", "gsm8k has one version of its prompts: leave out --suite-version 1."),
    ],
)
def test_other_versions_are_refused(suite: str, version: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check(RunSettings(policy="full", suite=suite, suite_version=version))
    check(RunSettings(policy="full", suite="ruler", suite_version="1"))
