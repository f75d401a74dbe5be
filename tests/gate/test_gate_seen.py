"""A finding about a policy whose budget is no bound says what its queries saw."""

from dataclasses import replace

import pytest
from gate.gate_cases import right, write_run

from evictbench.cli.gate import as_markdown, as_table
from evictbench.gate import ask
from evictbench.gate.ask import findings
from evictbench.gate.finding import GateRequest
from evictbench.gate.seen import policy_of
from evictbench.store.select import Filters


@pytest.fixture
def request_of(tmp_path):
    for side in ("here", "there"):
        for policy in ("dms", "h2o"):
            for task, seen in (("niah", 60.0), ("vt", 30.0)):
                lines = right(30, 40, occupancy=seen, task=task)
                write_run(tmp_path / side, lines, policy=policy, budget="64", tasks=(task,))
            both = [*right(9, 9, occupancy=60.0, task="niah"), *right(9, 9, occupancy=30.0, task="vt")]
            write_run(tmp_path / side, both, policy=policy, budget="32", tasks=("niah", "vt"))
        write_run(tmp_path / side, right(40, 40, occupancy=500.0), policy="full", budget=None)
    return GateRequest(tmp_path / "here", baseline=tmp_path / "there")


def test_it_stands_in_every_form_and_only_there(request_of):
    found = findings(request_of)
    dms = {finding.task: finding.seen for finding in found if finding.cell == "dms @ 64"}
    assert dms == {"niah": "saw 60.0, a head at most 60", "vt": "saw 30.0, a head at most 30"}
    whole = [finding for finding in found if finding.cell == "dms @ 32"]
    assert {(finding.task, finding.seen) for finding in whole} == {("mean", "saw 45.0, a head at most 60")}
    assert {finding.seen for finding in found if not finding.cell.startswith("dms")} == {None}
    for text in (as_table(found, whole=True), as_markdown(found)):
        assert "dms @ 64 (saw 60.0, a head at most 60)" in text
        assert "h2o @ 64 (" not in text


def test_runs_are_read_once_where_every_budget_is_a_bound(request_of, monkeypatch):
    read, theirs = [], ask.read_results
    monkeypatch.setattr(ask, "read_results", lambda folder, **options: read.append(folder) or theirs(folder, **options))
    findings(request_of)
    assert len(read) == 3
    read.clear()
    findings(replace(request_of, filters=Filters(policy="h2o")))
    assert len(read) == 2


def test_the_policy_of_a_cell():
    for cell, policy in (("dms @ 64", "dms"), ("a @ b.py:C @ 25%", "a @ b.py:C"), ("full", "full")):
        assert policy_of(cell) == policy
