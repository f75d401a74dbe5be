"""The numbers of the report: differences from the full cache, their p, the leaderboard's rows."""

import itertools
from statistics import fmean

import pytest
from plot.plot_records import sample, write_run
from scipy.stats import t

import evictbench
from evictbench.paired import difference
from evictbench.report_tables import leaderboard


def documents(*values, task="a"):
    return {(task, number): float(value) for number, value in enumerate(values)}


def test_a_difference_is_over_the_documents_that_both_have():
    found = difference(documents(1, 0, 1, 1), documents(0, 0, 1))
    values = [1.0, 0.0, 0.0]
    half = t.ppf(0.975, 2) * (sum((v - 1 / 3) ** 2 for v in values) / 2) ** 0.5 / 3**0.5
    assert found.documents == 3
    assert found.value == pytest.approx(1 / 3)
    assert (found.low, found.high) == pytest.approx((1 / 3 - half, 1 / 3 + half))
    assert difference(documents(1), documents(1, task="b")) is None


def test_no_spread_is_no_interval_and_few_documents_are_no_proof():
    found = difference(documents(1, 1), documents(0, 0))
    assert (found.value, found.low, found.high) == (1.0, None, None)
    assert found.p_value() == 0.5
    assert difference(documents(1, 1), documents(1, 1)).p_value() == 1.0


def test_p_is_the_share_of_sign_flips_that_are_as_far_off():
    first = documents(0.9, 0.2, 0.7, 0.4) | documents(0.5, 0.6, task="b")
    second = documents(0.1, 0.3, 0.2, 0.1) | documents(0.5, 0.2, task="b")
    tasks = [[0.8, -0.1, 0.5, 0.3], [0.0, 0.4]]
    found = difference(first, second)
    assert found.value == pytest.approx(fmean(map(fmean, tasks)))

    def far(signs):
        flipped = iter(signs)
        return abs(fmean(fmean(value * next(flipped) for value in task) for task in tasks)) >= abs(found.value) - 1e-9

    share = fmean(far(signs) for signs in itertools.product((1, -1), repeat=6))
    assert found.p_value() == pytest.approx(share)


def test_drawn_signs_come_near_the_exact_share():
    wins = difference(documents(*[1] * 15, *[0] * 5), documents(*[0] * 15, *[1] * 5))
    assert wins.p_value() == pytest.approx(0.0414, abs=0.01)  # the exact two-sided sign test of 15 against 5


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
