"""Runs against published numbers: which go together, and what is said of them."""

import numpy as np
import pytest
from gate.published_cases import answers, published, write_pair
from plot.plot_records import sample, write_run

from evictbench.errors import UserError
from evictbench.gate import published as gate_published
from evictbench.gate.arms import Arm, Run
from evictbench.gate.published import _judged, _range, _Row, against_published
from evictbench.gate.retention import Retention
from evictbench.gate.wanted import preset_tasks
from evictbench.stats.intervals import holm


@pytest.fixture
def draw():
    return np.random.default_rng(0)


def one(folder, *entries, **options):
    found = against_published(folder, entries, **options)
    assert len(found) == 1
    return found[0]


def test_verdicts(tmp_path, draw):
    write_pair(tmp_path, *answers(draw, 4000, 0.8, 0.9), model="Tiny")
    good = one(tmp_path, published())
    assert good.status == "reproduced"
    assert not good.fails
    assert good.cell == "h2o @ 64"
    assert good.quantity == "retention"
    assert good.samples == 4000
    assert good.there == pytest.approx(72 / 80.01)
    assert good.difference == pytest.approx(good.here - good.there)
    assert good.low < good.difference < good.high
    assert good.p < 0.05
    assert "2601.00001, Table 1, row H2O" in good.why
    low = one(tmp_path, published(value=78.00))
    assert low.status == "below"
    assert low.fails
    assert "more than 2 points below" in low.why
    high = one(tmp_path, published(value=60.00))
    assert high.status == "above"
    assert not high.fails
    few = one(tmp_path, published(), tolerance=0.001)
    assert few.status == "too few samples"
    assert not few.fails
    assert few.p is None
    assert "are enough in 80% of runs" in few.why


def test_a_number_read_off_a_plot_does_not_fail_a_gate(tmp_path, draw):
    write_pair(tmp_path, *answers(draw, 2000, 0.8, 0.6), model="tiny")
    found = one(tmp_path, published(confidence="plot"))
    assert found.status == "below"
    assert not found.fails
    assert "read off a plot" in found.why


def test_repeats_are_no_samples(tmp_path, draw):
    arm, full = answers(draw, 30, 0.8, 0.9)
    for scores, policy, budget in ((arm, "h2o", "64"), (full, "full", None)):
        lines = [sample(n, float(x), repeat=r) for n, x in enumerate(scores) for r in range(50)]
        write_run(tmp_path, lines, policy=policy, budget=budget)
    found = one(tmp_path, published())
    assert found.status == "too few samples"
    assert found.samples == 30


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "org/other"},
        {"policy": "tova"},
        {"policy": "a policy that is not ours"},
        {"budget": "128"},
        {"budget": "25%"},
        {"budget": None},
        {"suite": "longbench"},
        {"task": "vt"},
        {"policy": "full", "budget": None},
        {"unit": "tokens/s", "metric": "throughput"},
        {"metric": "share of truncated answers"},
    ],
)
def test_numbers_about_other_things_are_passed_over(tmp_path, draw, changes):
    write_pair(tmp_path, *answers(draw, 20, 0.8, 0.9))
    assert against_published(tmp_path, [published(**changes)]) == []


@pytest.mark.parametrize("model", ["tiny", "Other-Org/TINY", "/models/Tiny/"])
def test_a_model_by_another_name(tmp_path, draw, model):
    write_pair(tmp_path, *answers(draw, 20, 0.8, 0.9), model=model)
    assert one(tmp_path, published()).status == "too few samples"


def test_a_budget_written_another_way(tmp_path, draw):
    write_pair(tmp_path, *answers(draw, 20, 0.8, 0.9), budget="25%")
    assert one(tmp_path, published(budget="25.0%")).status == "too few samples"


@pytest.mark.parametrize(
    ("protocol", "named"),
    [
        ({"question": "seen"}, "question (unseen here, seen there)"),
        ({"context": 4096}, "context (512 here, 4096 there)"),
        ({"temperature": 0.6, "top_p": 0.95}, "temperature (0 here, 0.6 there)"),
        ({"thinking": True}, "thinking (no here, yes there)"),
        ({"chat": True}, "chat (no here, yes there)"),
        ({"context": "4K"}, "context (512 here, 4K there)"),
        ({"prefill": "bounded"}, "prefill (dense here, bounded there)"),
        ({"max_new_tokens": 3}, "max_new_tokens (16 here, 3 there)"),
    ],
)
def test_protocols_that_differ_are_named(tmp_path, draw, protocol, named):
    write_pair(tmp_path, *answers(draw, 3000, 0.8, 0.5))
    found = one(tmp_path, published(protocol=protocol))
    assert found.status == "not comparable"
    assert not found.fails
    assert named in found.why


@pytest.mark.parametrize(
    "protocol",
    [
        {"question": "unseen", "context": 512, "temperature": 0, "thinking": False, "chat": False},
        {"temperature": 0.0, "top_p": 0.9, "top_k": 20},  # greedy: the rest says nothing
        {"max_new_tokens": 512},  # no answer came up to 16 tokens
        {"max_new_tokens": 16},
        {"dtype": "float16", "batch_size": 4, "hardware": "A100", "shots": 8, "samples": 100},
        {"prefill": "dense"},  # H2O's own way
        {"chunk": 512},
    ],
)
def test_protocols_that_do_not_differ(tmp_path, draw, protocol):
    write_pair(tmp_path, *answers(draw, 20, 0.8, 0.9))
    assert one(tmp_path, published(protocol=protocol)).status == "too few samples"


def test_sampling_and_prefill_that_differ(tmp_path, draw):
    arm, full = answers(draw, 20, 0.8, 0.9)
    write_pair(tmp_path, arm, full, temperature=0.6, top_p=0.95, top_k=20, prefill="bounded", chunk=256)
    entry = published(protocol={"temperature": 0.6, "top_p": 0.8, "top_k": 20, "prefill": "dense", "chunk": 128})
    why = one(tmp_path, entry).why
    assert "top_p (0.95 here, 0.8 there)" in why
    assert "prefill (bounded here, dense there)" in why
    assert "chunk (256 here, 128 there)" in why
    assert "top_k" not in why


@pytest.mark.parametrize("prefill", ["native", "dense", "bounded"])
def test_masked_is_like_no_other_prefill(tmp_path, draw, prefill):
    """Under a mask an evicted entry may return, which it cannot in a run."""
    write_pair(tmp_path, *answers(draw, 20, 0.8, 0.9), prefill=prefill)
    assert "there)" in (why := one(tmp_path, published(protocol={"prefill": "masked"})).why)
    assert "here, masked there)" in why


def test_no_full_cache_beside_it(tmp_path, draw):
    arm, full = answers(draw, 20, 0.8, 0.9)
    lines = [[sample(n, float(x)) for n, x in enumerate(scores)] for scores in (arm, full)]
    write_run(tmp_path, lines[0], policy="h2o", budget="64")
    write_run(tmp_path, lines[1], policy="full", budget=None, temperature=0.6)  # another protocol
    write_run(tmp_path, lines[1], policy="full", budget=None, model="other")
    found = one(tmp_path, published())
    assert found.status == "not comparable"
    assert "no run of the full cache beside h2o @ 64" in found.why
    assert "--policy full" in found.why


def test_a_full_cache_that_scores_nothing(tmp_path):
    write_pair(tmp_path, np.zeros(5), np.zeros(5))
    assert "no retention" in one(tmp_path, published()).why


def test_documents_that_only_one_has_do_not_count(tmp_path):
    write_run(tmp_path, [sample(n, 1.0) for n in range(10)], policy="h2o", budget="64")
    write_run(tmp_path, [sample(n, float(n < 8)) for n in range(6, 30)], policy="full", budget=None)
    found = one(tmp_path, published())
    assert found.samples == 4
    assert found.here == 2


def test_other_settings_of_the_policy(tmp_path, draw):
    from evictbench.registry import parse_policy

    plain, other = parse_policy("streaming_llm"), parse_policy("streaming_llm:sinks=8")
    arm, full = answers(draw, 20, 0.8, 0.9)
    write_pair(tmp_path, arm, full, policy=other.label, settings=other.settings)
    found = one(tmp_path, published(policy="streaming_llm"))
    assert found.status == "not comparable"
    assert "sinks of the policy (8 here, 4 there)" in found.why
    lines = [sample(n, float(x)) for n, x in enumerate(arm)]
    write_run(tmp_path, lines, policy=plain.label, budget="64", settings=plain.settings)
    found = one(tmp_path, published(policy="streaming_llm"))  # the other run is passed over now
    assert found.status == "too few samples"
    assert found.cell == "streaming_llm @ 64"


def test_a_paper_without_a_full_cache(tmp_path, draw):
    write_pair(tmp_path, *answers(draw, 20, 0.8, 0.9))
    assert one(tmp_path, published(full=None, retention=90.0)).there == pytest.approx(0.9)


def test_a_number_without_a_full_cache_is_compared_as_a_score(tmp_path, draw):
    arm, full = answers(draw, 4000, 0.8, 0.9)
    write_pair(tmp_path / "pair", arm, full)
    score = float(arm.mean())
    found = one(tmp_path / "pair", published(full=None, value=round(100 * score, 2)))
    assert (found.status, found.quantity, found.fails) == ("reproduced", "score", False)
    assert found.here == pytest.approx(score)
    assert "the paper has no full cache beside it" in found.why
    low = one(tmp_path / "pair", published(full=None, value=90.0))
    assert (low.status, low.fails) == ("below", False)  # prompts and graders move it too
    write_run(tmp_path / "alone", [sample(n, float(x)) for n, x in enumerate(arm)], policy="h2o", budget="64")
    assert one(tmp_path / "alone", published(full=None, value=90.0)).here == pytest.approx(score)  # and needs none


@pytest.mark.parametrize(("printed", "status"), [(90.0, "reproduced"), (95.0, "below"), (80.0, "above")])
def test_a_retention_that_a_paper_prints_alone(tmp_path, draw, printed, status):
    write_pair(tmp_path, *answers(draw, 4000, 0.8, 0.9))
    found = one(tmp_path, published(metric="retention", value=printed, full=None))
    assert (found.status, found.quantity, found.there) == (status, "retention", pytest.approx(printed / 100))


def mean_runs(root, tasks, skewed=False, **changes):
    """Two policies; the arm gets every second document of the last task wrong, and nothing else."""
    for policy, budget in (("h2o", "64"), ("full", None)):
        lines = [
            sample(n, float(policy == "full" or task != tasks[-1] or n % 2), task=task)
            for task in tasks
            for n in range(30 if skewed and task == tasks[-1] else 10)
        ]
        write_run(root, lines, policy=policy, budget=budget, tasks=tasks, **changes)


def test_a_mean_is_over_the_tasks_of_the_suite(tmp_path):
    from evictbench.registry import load_suite

    tasks = load_suite("ruler").tasks
    mean_runs(tmp_path / "whole", tasks)
    whole = one(tmp_path / "whole", published(task="mean"))
    assert whole.here == pytest.approx(1 - 0.5 / len(tasks))
    mean_runs(tmp_path / "part", ("niah_single_1", "vt"))
    part = one(tmp_path / "part", published(task="mean"))
    assert part.status == "not comparable"
    assert "tasks (" in part.why
    assert "fwe" in part.why


def test_a_mean_of_a_suite_that_is_not_installed_is_over_what_was_run(tmp_path):
    for name, skewed in (("even", False), ("skewed", True)):
        mean_runs(tmp_path / name, ("a", "b"), skewed, suite="theirs")
    assert one(tmp_path / "even", published(suite="theirs", task="mean")).here == pytest.approx(0.75)
    assert one(tmp_path / "skewed", published(suite="theirs", task="mean")).here == pytest.approx(0.75)
    by_size = published(suite="theirs", task="mean", weighting="documents")
    assert one(tmp_path / "skewed", by_size).here == pytest.approx(25 / 40)


def test_a_papers_own_preset_names_the_tasks_of_its_mean():
    entry = published(title="DistillCache: a title", paper="2608.08878", suite="longbench", task="mean")
    tasks = preset_tasks(entry, "longbench")
    assert "hotpotqa_rouge" in tasks
    assert "hotpotqa" not in tasks
    assert "hotpotqa" in preset_tasks(published(suite="longbench", task="mean"), "longbench")


def test_a_printed_number_is_a_range():
    beside = [published(), published(value=70.0, full=80.0, source="Table 2, row H2O")]
    low, high, spread, there = _range(beside[0], beside)
    assert (low, high) == pytest.approx((71.995 / 80.015, 72.005 / 80.005))
    assert (spread, there) == pytest.approx((0, 72 / 80.01))
    low, high, _, _ = _range(beside[1], beside)
    assert (low, high) == pytest.approx((69.5 / 80.5, 70.5 / 79.5))  # its table prints whole numbers
    shares = published(value=0.58, full=0.6, unit="share", spread=0.03)
    low, high, spread, _ = _range(shares, [shares])
    assert (low, high) == pytest.approx((0.575 / 0.605, 0.585 / 0.595))
    assert spread == pytest.approx(0.05)


def test_both_numbers_of_a_contradiction_are_one_range(tmp_path, draw):
    write_pair(tmp_path, *answers(draw, 3000, 0.8, 0.83))
    pair = [published(contradiction="text"), published(value=60.0, source="section 1", contradiction="text")]
    found = one(tmp_path, *pair)
    assert found.status == "reproduced"
    assert "Table 1, row H2O and 2601.00001, section 1" in found.why
    assert [one(tmp_path, published(value=value)).status for value in (60.0, 72.00)] == ["above", "below"]


def test_a_spread_of_the_paper_that_hides_everything(tmp_path, draw):
    write_pair(tmp_path, *answers(draw, 3000, 0.8, 0.8))
    assert one(tmp_path, published()).status == "below"
    found = one(tmp_path, published(spread=8.0))
    assert found.status == "too few samples"
    assert "no number of them would" in found.why


def test_no_results(tmp_path):
    with pytest.raises(UserError, match="no results"):
        against_published(tmp_path, [published()])


def rows(draw, kept, count=150, full=0.8, there=0.9):
    """Judged rows of one paper, one for each true retention."""
    found = []
    for truth in kept:
        arm, base = answers(draw, count, full, truth)
        here = Retention((tuple(zip(arm.tolist(), base.tolist(), strict=True)),))
        run = Run({"policy": "h2o", "budget": "64", "suite": "ruler", "base_model": None}, 0, {}, None)
        found.append(_Row(Arm(((run,),)), [published()], here, there, there, there, 0.0))
    return found


def quick_holm(p_values):
    """What `stats.holm` gives, without the collection of garbage that statsmodels begins with."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        largest = max(largest, min(1.0, p_values[number] * (len(p_values) - place)))
        adjusted[number] = largest
    return adjusted


@pytest.fixture
def quick(monkeypatch):
    """Verdicts alone: what is said beside them takes most of the time."""
    p_values = [0.01, 0.9, 0.02, 0.02, 0.6]
    assert quick_holm(p_values) == pytest.approx(holm(p_values))
    monkeypatch.setattr(gate_published, "holm", quick_holm)
    monkeypatch.setattr(Retention, "interval", lambda self: None)
    monkeypatch.setattr(Retention, "documents_needed", lambda *_: 1)


def verdicts(made, tolerance=0.02):
    return [finding.status for finding in _judged(made, tolerance)]


@pytest.mark.usefixtures("quick")
def test_false_alarms_over_a_family_of_rows(draw):
    """Eight rows, each truly as far below the paper as is let pass: the hardest case that is no fault."""
    families = 200
    hardest = sum("below" in verdicts(rows(draw, [0.88] * 8)) for _ in range(families))
    assert hardest / families < 0.05 + 3 * np.sqrt(0.05 * 0.95 / families)
    as_published = sum("below" in verdicts(rows(draw, [0.9] * 8)) for _ in range(families))
    assert as_published / families < 0.02
    # And it is no gate that never fails: of four rows that lost a fifth, most are found among four that did not.
    lost = [verdicts(rows(draw, [0.9] * 4 + [0.7] * 4)) for _ in range(40)]
    assert np.mean([status == "below" for family in lost for status in family[4:]]) > 0.8
    assert np.mean([status == "below" for family in lost for status in family[:4]]) < 0.02


def test_so_many_documents_as_are_said_to_be_needed_are(draw, request):
    said = next(iter(_judged(rows(draw, [0.9], count=400), 0.05)))
    assert said.status == "too few samples"
    needed = int(said.why.partition(" are enough")[0].rpartition(" ")[2])
    assert 400 < needed < 3000
    request.getfixturevalue("quick")
    found = [verdicts(rows(draw, [0.9], count=needed), 0.05)[0] for _ in range(200)]
    assert 0.7 < np.mean([status == "reproduced" for status in found]) < 0.9
