"""`evictbench gate RUNS --published`, from files to exit codes."""

import json

import numpy as np
import pytest
from gate.gate_cases import right, write_run
from gate.published_cases import answers, published, write_pair

from evictbench.store import published as module


@pytest.fixture
def paper(monkeypatch):
    """Its retention is 0.9."""
    monkeypatch.setattr(module, "read_published", lambda: (published(),))


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize(("kept", "status", "code"), [(0.9, "reproduced", 0), (0.6, "below", 1)])
def test_below_fails_and_reproduced_does_not(gate, tmp_path, kept, status, code):
    arm, full = answers(np.random.default_rng(0), 4000, 0.8, kept)
    write_pair(tmp_path / "runs", arm, full, model="tiny")
    found, out, err = gate(tmp_path / "runs", "--published", "--json", "--quiet")
    assert (found, err) == (code, "")
    finding = json.loads(out)["findings"][0]
    assert (finding["status"], finding["quantity"], finding["fails"]) == (status, "retention", bool(code))


@pytest.mark.usefixtures("paper")
def test_the_filters_choose_the_arm_and_leave_the_full_cache_beside_it(gate, tmp_path):
    arm, full = answers(np.random.default_rng(0), 4000, 0.8, 0.6)
    write_pair(tmp_path / "runs", arm, full, model="tiny")
    write_run(tmp_path / "runs", right(10, 4000), policy="tova", model="tiny")
    assert gate(tmp_path / "runs", "--published", "--policy", "h2o")[0] == 1
    code, _, err = gate(tmp_path / "runs", "--published", "--policy", "tova")
    assert code == 2
    assert "is of a policy, model and suite that a published number is about" in err
