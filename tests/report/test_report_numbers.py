"""The numbers of the report: differences from the full cache, the leaderboard's rows."""

import pytest
from plot.plot_records import right, sample, write_run

import evictbench
from evictbench.report.page import columns
from evictbench.report.tables import leaderboard
from evictbench.report.warnings import warnings


def test_repeats_are_no_new_documents(tmp_path):
    def run(policy, budget, score):
        lines = [sample(doc, score(doc), repeat=repeat) for doc in range(3) for repeat in range(8)]
        write_run(tmp_path, lines, policy=policy, budget=budget)

    run("full", None, lambda doc: 0.0)
    run("h2o", "64", lambda doc: float(doc < 2))
    row = next(row for row in leaderboard(evictbench.results(tmp_path)).rows if row.policy == "h2o")
    assert (row.documents, row.samples) == (3, 24)
    assert row.versus.documents == 3
    assert row.versus.p_value() == 0.5


def test_rows_of_runs_and_of_their_tasks(runs):
    board = leaderboard(evictbench.results(runs))
    assert board.metrics == ["kl"]
    rows = {(row.policy, row.budget, row.task): row for row in board.rows}
    assert len(rows) == len(board.rows) == 16
    mean, niah = rows["h2o", "64", "mean of 2"], rows["h2o", "64", "niah"]
    assert (mean.score, niah.score) == pytest.approx((0.3, 0.4))
    assert (mean.whole, niah.whole) == (True, False)
    assert mean.versus.value == pytest.approx(-0.05)
    assert niah.versus.value == pytest.approx(-0.1)
    assert rows["full", "none", "vt"].versus is None
    other = rows["h2o", "25%", "gsm8k"]
    assert (other.whole, other.versus, other.metrics) == (True, None, {"kl": 0.5})


def test_only_runs_of_one_protocol_are_compared(tmp_path):
    lines = [sample(doc, float(doc < 5)) for doc in range(10)]
    write_run(tmp_path, lines, policy="full", budget=None, question="seen")
    write_run(tmp_path, lines, policy="h2o", budget="64", question="unseen")
    write_run(tmp_path, lines, policy="tova", budget="64", question="seen", prefill="dense")
    rows = {row.policy: row for row in leaderboard(evictbench.results(tmp_path)).rows}
    assert rows["h2o"].versus is None
    assert rows["tova"].versus.value == 0


@pytest.mark.parametrize("tasks", [("niah",), ("niah", "qa")])
def test_an_interval_of_differences_stays_within_what_scores_allow(tmp_path, tasks):
    """Of one task and of the mean over tasks, where the policy is far worse and where it is far better."""

    def write(folder, right, **what):
        samples = [sample(doc, right(doc), task=task) for task in tasks for doc in range(10)]
        write_run(tmp_path / folder, samples, tasks=tasks, **what)

    for folder, full in (("worse", 1.0), ("better", 0.0)):
        write(folder, lambda doc, full=full: full, policy="full", budget=None)
        write(folder, lambda doc, full=full: full if doc == 0 else 1 - full, policy="h2o", budget="64")
        rows = [row for row in leaderboard(evictbench.results(tmp_path / folder)).rows if row.policy == "h2o"]
        assert len(rows) == (3 if len(tasks) > 1 else 1)
        for row in rows:
            low, high = (row.versus.low, row.versus.high) if full else (-row.versus.high, -row.versus.low)
            assert abs(row.versus.value) == pytest.approx(0.9)
            assert low == -1.0
            assert -0.9 < high < 0


def test_a_full_cache_that_says_nothing_is_a_warning(tmp_path):
    silent = [sample(doc, 0.0, output_tokens=0) for doc in range(12)]
    write_run(tmp_path, silent, policy="full", budget=None)
    write_run(tmp_path, silent, policy="h2o", budget="64")
    samples = evictbench.results(tmp_path)
    (notice,) = [each for each in warnings(samples, leaderboard(samples)) if each.kind == "full cache in doubt"]
    assert "12 of 12 answers of the full cache are wrong and at most one token long" in notice.text
    assert notice.run == samples[samples["policy"] == "full"]["fingerprint"].iloc[0]


def test_a_row_says_whose_weights_its_policy_has(tmp_path):
    """A policy that another model's weights serve is not the paper's row of this model."""
    weights = {"sha256": "0", "variant": "", "transferred_from": "SmolLM2-135M"}
    lines = right(5, 10) + right(4, 10, task="vt")
    write_run(tmp_path, lines, tasks=("niah", "vt"))
    write_run(tmp_path, lines, tasks=("niah", "vt"), policy="distillcache", policy_weights=weights)
    board = leaderboard(evictbench.results(tmp_path))
    shown = next(column for column in columns(board) if column.heading == "policy")
    assert {shown.text(row) for row in board.rows} == {"h2o", "distillcache (weights of SmolLM2-135M)"}


def test_the_budget_of_a_policy_without_a_bound_says_what_was_seen(tmp_path):
    for policy in ("h2o", "dms", "snapkv:decode=append", "not_installed"):
        lines = [sample(doc, 1.0, occupancy=60.0 + doc) for doc in range(11)]
        write_run(tmp_path, lines, policy=policy, budget="64", tasks=("niah",))
    board = leaderboard(evictbench.results(tmp_path))
    (column,) = [column for column in columns(board) if column.heading == "budget"]
    shown = {row.policy: (row.bound, column.text(row), column.value(row)) for row in board.rows}
    seen = (False, "64 (saw 65.0, a head at most 70)", 64.0)
    assert shown == {
        "h2o": (True, "64", 64.0),
        "dms": seen,
        "snapkv:decode=append": seen,
        "not_installed": (True, "64", 64.0),
    }
