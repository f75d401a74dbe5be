"""The runs that `make gate` compares with what is published have its fingerprints, and so its folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from evictbench.evaluation.plan import make_plan
from evictbench.evaluation.settings import RunSettings
from studies import exact, reference

REFERENCE = Path(__file__).parents[2] / "results" / "reference"


def test_ruler_runs_extend_what_is_published(tmp_path: Path) -> None:
    shared: dict[Any, Any] = {}
    plan = make_plan(exact.ruler("full", tmp_path), shared=shared)
    assert (REFERENCE / "exact" / plan.folder.relative_to(tmp_path)).is_dir()
    settings = {**reference.WORKLOADS["ruler"], "limit": 1, "dtype": "float32", "prefill": "dense", "out": tmp_path}
    common = RunSettings(policy="full", suite="ruler", **settings)
    plan, newer = (make_plan(run, shared=shared) for run in (common, replace(common, suite_version=None)))
    assert (REFERENCE / "bundled" / plan.folder.relative_to(tmp_path)).is_dir()
    assert newer.folder != plan.folder
    assert newer.fingerprint["data"]["ruler"] != plan.fingerprint["data"]["ruler"]
    assert set(newer.fingerprint["tasks"].values()) == {"2"}
