"""Synthetic runs with known true differences: how often the gate fails where it should not, and where it should."""

import gc

import numpy as np
import pytest
from gate.gate_cases import pair, right_wrong, scaled

from evictbench.gate.baseline import against_baseline, smallest_found
from evictbench.gate.tolerances import COST_LEVEL, POWER, SCORE_LEVEL, TOLERANCE
from evictbench.stats.paired import difference

GATES = 150
KINDS = pytest.mark.parametrize("kind", [right_wrong, scaled])


@pytest.fixture(autouse=True)
def _quick():
    """statsmodels collects garbage at every correction; what there is already need not be gone through."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_the_two_levels_are_under_five_per_cent_together():
    assert SCORE_LEVEL + COST_LEVEL < 0.05


@pytest.mark.parametrize(
    ("kind", "drop", "gates"), [(scaled, 0.0, 100), (scaled, TOLERANCE, 300), (right_wrong, TOLERANCE, 300)]
)
def test_false_alarms_of_a_whole_gate_are_under_five_per_cent(kind, drop, gates):
    """Three cells, none of which has dropped by more than the tolerance; what they hold goes up and down by chance."""
    draw = np.random.default_rng(7)
    alarms = 0
    for _ in range(gates):
        pairs = []
        for number in range(3):
            held = draw.normal(64, 2, (2, 60))
            pairs.append(pair(*kind(draw, 60, drop), name=f"arm{number} @ 64", occupancy=tuple(held)))
        alarms += any(finding.fails for finding in against_baseline(pairs))
    assert alarms / gates < 0.05


@KINDS
def test_a_drop_of_the_size_that_the_gate_names_is_found_as_often_as_it_says(kind):
    draw = np.random.default_rng(11)
    documents = 150
    unchanged = [_apart(*kind(draw, documents, 0.0)) for _ in range(10)]
    size = float(np.mean([smallest_found(apart) for apart in unchanged]))
    found = [_apart(*kind(draw, documents, size)).p_below(TOLERANCE) < SCORE_LEVEL for _ in range(GATES)]
    assert POWER - 0.1 < np.mean(found) < POWER + 0.1


def test_a_drop_among_many_cells_is_found_and_the_others_pass():
    draw = np.random.default_rng(3)
    pairs = [pair(*right_wrong(draw, 200, 0.0), name=f"arm{number} @ 64") for number in range(5)]
    pairs.append(pair(*right_wrong(draw, 200, 0.25), name="worse @ 64"))
    failed = [finding for finding in against_baseline(pairs) if finding.fails]
    assert [(finding.cell, finding.quantity) for finding in failed] == [("worse @ 64", "score")]
    assert failed[0].p < SCORE_LEVEL
    assert failed[0].low < failed[0].difference < failed[0].high < -TOLERANCE


def test_a_score_that_is_better_passes():
    here, there = right_wrong(np.random.default_rng(3), 200, -0.2)
    assert [finding.status for finding in against_baseline([pair(here, there)])] == ["passed"] * 3


def test_an_entry_more_in_every_document_fails_and_its_fluctuation_does_not():
    scores = right_wrong(np.random.default_rng(3), 40, 0.0)
    one_more = pair(*scores, occupancy=(np.full(40, 257.0), np.full(40, 256.0)))
    by_quantity = {finding.quantity: finding for finding in against_baseline([one_more])}
    assert by_quantity["occupancy"].fails
    assert "40 of 40 documents hold more" in by_quantity["occupancy"].why
    assert not by_quantity["bytes"].fails  # 0.4%, and 1% is let pass
    fewer = pair(*scores, occupancy=(np.full(40, 250.0), np.full(40, 256.0)))
    assert not any(finding.fails for finding in against_baseline([fewer]))


def test_the_same_runs_pass_whatever_the_tolerance():
    here, _ = right_wrong(np.random.default_rng(3), 40, 0.0)
    assert not any(finding.fails for finding in against_baseline([pair(here, here)], tolerance=0.0))


def test_where_nothing_differs_it_does_not_say_what_would_be_found():
    here, _ = right_wrong(np.random.default_rng(3), 40, 0.0)
    score = against_baseline([pair(here, here)])[0]
    assert score.finds is None
    assert score.why == "No drop beyond 2 points is shown; no score differs."


def test_one_changed_answer_does_not_promise_that_a_few_would_be_found():
    """Of 200 answers, seven lost are 3.5 points and are not significantly more than two."""
    there = np.ones(200)
    one, seven = there.copy(), there.copy()
    one[:1], seven[:7] = 0, 0
    assert against_baseline([pair(one, there)])[0].finds > 0.035
    assert against_baseline([pair(seven, there)])[0].status == "passed"


def _apart(here, there):
    return difference(*({("niah", number): float(score) for number, score in enumerate(one)} for one in (here, there)))
