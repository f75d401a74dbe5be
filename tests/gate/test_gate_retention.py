"""Retention and its tests, on scores made with a known true retention."""

import numpy as np
import pytest

from evictbench.gate.retention import Retention, retention

DESIGNS = [  # documents of a task, tasks, the full cache's score, true retention, P(right | full cache wrong)
    (20, 1, 0.9, 0.95, 0.1),
    (30, 1, 0.95, 0.97, 0.1),
    (50, 1, 0.5, 0.1, 0.01),
    (100, 1, 0.6, 0.5, 0.1),
    (20, 5, 0.9, 0.9, 0.1),
]


def drawn(draw, count, tasks, full, kept, gained):
    """Right-or-wrong documents whose true retention is `kept`."""
    right = (kept * full - (1 - full) * gained) / full
    assert 0 <= right <= 1
    by_task = []
    for _ in range(tasks):
        f = draw.random(count) < full
        a = draw.random(count) < np.where(f, right, gained)
        by_task.append(tuple(zip(a.astype(float).tolist(), f.astype(float).tolist(), strict=True)))
    return Retention(tuple(by_task))


def fractional(draw, count, full, kept, spread=0.2):
    """Scores between 0 and 1, the arm's a noisy share of the full cache's."""
    f = draw.beta(4 * full, 4 * (1 - full), count)
    a = np.where(draw.random(count) < spread, 0, f * kept / (1 - spread))
    return Retention((tuple(zip(a.tolist(), f.tolist(), strict=True)),))


@pytest.mark.parametrize("design", DESIGNS)
def test_a_true_retention_is_seldom_refused(design):
    draw = np.random.default_rng(1)
    runs = [drawn(draw, *design) for _ in range(800)]
    below = np.mean([run.p_below(design[3]) < 0.05 for run in runs])
    above = np.mean([run.p_above(design[3]) < 0.05 for run in runs])
    assert max(below, above) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / len(runs))


def test_a_true_retention_of_fractional_scores_is_seldom_refused():
    draw = np.random.default_rng(2)
    runs = [fractional(draw, 60, 0.5, 0.75) for _ in range(800)]
    refused = [np.mean([p(run) < 0.05 for run in runs]) for p in (lambda r: r.p_below(0.75), lambda r: r.p_above(0.75))]
    assert max(refused) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / len(runs))
    assert min(refused) > 0.005  # and it is no test that never refuses


def test_tasks_that_keep_very_different_shares():
    """As in RULER: one task kept whole, one half lost, one nearly gone; they weigh alike, in unequal numbers."""
    draw = np.random.default_rng(7)
    tasks = ((30, 0.9, 1.0), (60, 0.8, 0.5), (20, 0.9, 0.1))
    truth = sum(full * kept for _, full, kept in tasks) / sum(full for _, full, _ in tasks)
    runs = [
        Retention(tuple(drawn(draw, count, 1, full, kept, 0.05).by_task[0] for count, full, kept in tasks))
        for _ in range(600)
    ]
    below = np.mean([run.p_below(truth) < 0.05 for run in runs])
    above = np.mean([run.p_above(truth) < 0.05 for run in runs])
    assert max(below, above) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / len(runs))
    assert np.mean([run.p_below(truth + 0.15) < 0.05 for run in runs]) > 0.5


def test_the_interval_holds_the_truth_as_often_as_it_says():
    draw = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        low, high = drawn(draw, 60, 1, 0.7, 0.8, 0.1).interval()
        held += low <= 0.8 <= high
    assert held / 200 > 0.95 - 3 * np.sqrt(0.05 * 0.95 / 200)


def test_thirty_documents_that_come_out_alike_prove_little():
    alike = Retention((((1.0, 1.0),) * 30,))
    assert alike.value == 1
    assert alike.p_above(0.95) > 0.1  # by chance alone 0.95 ** 30 = 0.21
    low, high = alike.interval()
    assert low < 0.92
    assert high > 1.0  # a gain needs a document that the full cache gets wrong, and 30 say little of those
    assert Retention((((1.0, 1.0),) * 400,)).p_above(0.95) < 1e-4


def test_none_right_of_thirty_is_not_far_below_a_tenth():
    assert Retention((((0.0, 1.0),) * 30,)).p_below(0.08) > 0.04  # 0.92 ** 30 = 0.08
    assert Retention((((0.0, 1.0),) * 30,)).p_below(0.2) < 0.01


def test_by_hand():
    found = Retention((((1.0, 1.0), (0.0, 1.0), (0.5, 1.0), (0.5, 0.0)), ((1.0, 0.5),) * 2))
    assert found.score == pytest.approx((0.5 + 1.0) / 2)
    assert found.full == pytest.approx((0.75 + 0.5) / 2)
    assert found.value == pytest.approx(0.75 / 0.625)
    assert found.documents == 6
    by_size = Retention(found.by_task, (4 / 6, 2 / 6))
    assert by_size.value == pytest.approx((2.0 + 2.0) / (3.0 + 1.0))


def test_like_the_score_test_of_one_share():
    """Where the full cache is always right, retention is the arm's share of right answers: z = (p - r) / sqrt(r(1-r)/n)
    with half an answer taken off."""
    run = Retention((((1.0, 1.0),) * 450 + ((0.0, 1.0),) * 50,))
    distance, error, skew = run._standing(0.87)
    assert error == pytest.approx(np.sqrt(0.87 * 0.13 / 500), rel=1e-3)
    assert distance == pytest.approx((0.03 - 0.001) / error)
    assert skew == pytest.approx((1 - 2 * 0.87) / np.sqrt(500 * 0.87 * 0.13), rel=1e-2)


def test_a_spread_of_the_number_itself_widens_the_test():
    run = drawn(np.random.default_rng(4), 300, 1, 0.8, 0.7, 0.1)
    assert run.p_below(0.8) < run.p_below(0.8, spread=0.05) < 0.5


@pytest.mark.parametrize(("full", "kept", "gained", "margin"), [(0.9, 0.9, 0.2, 0.05), (0.5, 0.5, 0.1, 0.08)])
def test_the_documents_needed_give_the_power_claimed(full, kept, gained, margin):
    draw = np.random.default_rng(5)
    low, high = kept - margin, kept + margin
    needed = drawn(draw, 500, 1, full, kept, gained).documents_needed(low, high)
    assert 100 < needed < 5000
    runs = [drawn(draw, needed, 1, full, kept, gained) for _ in range(400)]
    both = np.mean([run.p_above(low) < 0.05 and run.p_below(high) < 0.05 for run in runs])
    # Within three standard errors of 80%, and what the spread of 500 documents is unsure of.
    assert 0.72 < both < 0.88


def test_no_number_of_documents_makes_up_for_the_papers_own_spread():
    run = drawn(np.random.default_rng(6), 300, 1, 0.8, 0.7, 0.1)
    assert run.documents_needed(0.65, 0.75) is not None
    assert run.documents_needed(0.65, 0.75, spread=0.1) is None


def test_only_documents_that_both_have():
    arm = {("a", 0): 1.0, ("a", 1): 0.0, ("a", 7): 1.0, ("b", 0): 1.0}
    full = {("a", 0): 1.0, ("a", 1): 1.0, ("b", 0): 1.0, ("c", 0): 1.0}
    assert retention(arm, full, ["a"]).by_task == (((1.0, 1.0), (0.0, 1.0)),)
    assert retention(arm, full, ["a", "b"]).value == pytest.approx(0.75)
    assert retention(arm, full, ["a", "b"], {"a": 2 / 3, "b": 1 / 3}).value == pytest.approx(2 / 3)
    assert retention(arm, full, ["a", "c"]) is None
    assert retention(arm, {("a", 0): 0.0, ("a", 1): 0.0}, ["a"]) is None


def test_a_full_cache_of_almost_nothing_has_no_upper_end():
    few = Retention((((0.0, 0.0),) * 19 + ((1.0, 1.0),),))
    assert few.interval() is None or few.interval()[1] > 5
    assert Retention((((1.0, 1.0),),)).interval() is None
