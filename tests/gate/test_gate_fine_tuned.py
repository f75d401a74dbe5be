"""Runs of fine-tuned models against published numbers, means over suites, and several trainings as one row."""

import json

import pytest
from gate.published_cases import published
from plot.plot_records import sample, write_run

from evictbench.errors import UserError
from evictbench.gate.published import against_published
from evictbench.gate.retention import Retention
from evictbench.store import published as module

BASE = {"name": "org/Tiny", "sha256": "sha256:0", "policy": "streaming_llm"}
SCORER = {"sha256": "scorer 1", "variant": ""}


@pytest.fixture(autouse=True)
def _verdicts_alone(monkeypatch):
    """What is said beside a verdict takes most of the time, and is tested elsewhere."""
    monkeypatch.setattr(Retention, "interval", lambda self: None)
    monkeypatch.setattr(Retention, "documents_needed", lambda *_: 1)


def lines(scores, task="niah"):
    return [sample(number, float(score), task=task) for number, score in enumerate(scores)]


def write(root, scores, policy="streaming_llm", **what):
    """A run of `right` of 60 documents right, at 64 entries."""
    return write_run(root, lines(scores), policy=policy, **{"budget": "64", "model": "Tiny"} | what)


def right(count, of=60):
    return [number < count for number in range(of)]


def fine_tuned(root, scores, number=1, **what):
    tuned = {"model": "model", "weights": f"sha256:tuned {number}", "base_model": BASE}
    return write(root, scores, **tuned | what)


def full(root, scores=None, **what):
    return write(root, [1] * 60 if scores is None else scores, policy="full", **{"budget": None} | what)


def one(folder, *entries, **options):
    found = against_published(folder, entries, **{"tolerance": 0.2} | options)
    assert len(found) == 1, found
    return found[0]


PLAIN = published(policy="streaming_llm", value=50.0, full=100.0)
TUNED = published(
    policy="StreamingLLM+", runs_as="streaming_llm", trained="model", value=75.0, full=100.0, source="Table 1, row +"
)


def test_a_fine_tuned_model_is_held_against_its_bases_full_cache(tmp_path):
    fine_tuned(tmp_path, right(45))
    missing = one(tmp_path, TUNED)
    assert (missing.status, missing.fails) == ("not comparable", False)
    assert "model was fine-tuned from org/Tiny, whose full cache was not run beside" in missing.why
    assert "--policy full --model org/Tiny" in missing.why
    full(tmp_path, right(30), model="model", weights="sha256:tuned 1", base_model=BASE)  # the tuned one's own is none
    assert one(tmp_path, TUNED).status == "not comparable"
    full(tmp_path, right(30), weights="sha256:another")
    assert one(tmp_path, TUNED).status == "not comparable"
    full(tmp_path)
    found = one(tmp_path, TUNED)
    assert (found.here, found.there, found.cell) == (0.75, 0.75, "StreamingLLM+ @ 64")
    assert "of the score of the base model's, org/Tiny, full cache is kept" in found.why


def test_a_plain_run_is_the_plain_row_and_a_fine_tuned_one_the_other(tmp_path):
    write(tmp_path, right(30))
    fine_tuned(tmp_path, right(45))
    full(tmp_path)
    found = against_published(tmp_path, [PLAIN, TUNED], 0.2)
    assert {(finding.cell, finding.here, finding.there) for finding in found} == {
        ("streaming_llm @ 64", 0.5, 0.5),
        ("StreamingLLM+ @ 64", 0.75, 0.75),
    }


@pytest.mark.parametrize(
    ("run", "trained", "said"),
    [
        (
            {"policy_weights": SCORER},
            "model",
            "a scorer beside the frozen model was trained here, the model itself",
        ),
        (
            {"base_model": BASE, "policy_weights": SCORER},
            "scorer",
            "the model itself was trained here, a scorer",
        ),
        ({}, "scorer", "nothing was trained here, a scorer beside the frozen model there"),
    ],
)
def test_what_was_trained_must_be_the_same_and_a_sentence_says_so(tmp_path, run, trained, said):
    write(tmp_path, right(45), policy="h2o", **run)
    full(tmp_path)
    found = one(tmp_path, published(trained=trained))
    assert (found.status, found.fails) == ("not comparable", False)
    assert said in found.why
    own = "model" if "base_model" in run else "scorer" if run else "none"
    assert one(tmp_path, published(trained=own)).quantity == "retention"


def test_a_learned_policy_without_weights_has_them_in_its_model(tmp_path):
    """As DMS in a checkpoint that was trained to lend it a channel. Whose full cache it is held against is named."""
    write(tmp_path, right(45), policy="dms", model="org/Tiny-DMS-8x", weights="commit:1")
    full(tmp_path)
    entry = published(policy="dms", trained="model", value=75.0, full=100.0)
    assert against_published(tmp_path, [entry], 0.2) == []
    found = one(tmp_path, entry, bases={"org/Tiny-DMS-8x": "Tiny"})
    assert (found.here, found.there) == (0.75, 0.75)
    with pytest.raises(UserError, match=r"No run in .* is of the model org/Other, whose base is named"):
        one(tmp_path, entry, bases={"org/Other": "Tiny"})


def joint_runs(root, first=(1, 1), second=(1, 0), **what):
    """Two suites: one task of few documents, and two of more."""
    by_suite = {"a": lines(first, "a"), "b": lines(second, "b1") + lines(second, "b2")}
    for suite, found in by_suite.items():
        tasks = tuple(dict.fromkeys(line["task"] for line in found))
        write_run(root, found, suite=suite, tasks=tasks, **{"budget": "64", "model": "Tiny", "policy": "h2o"} | what)


def test_a_mean_over_suites_takes_runs_of_both_and_weighs_suites_alike(tmp_path):
    joint_runs(tmp_path)
    joint_runs(tmp_path, (1, 1), (1, 1), policy="full", budget=None)
    entry = published(suite="a+b", task="mean", value=75.0, full=100.0)
    found = one(tmp_path, entry)
    assert (found.suite, found.task, found.here) == ("a+b", "mean", 0.75)  # not 4 of 6


@pytest.mark.parametrize(
    "other",
    [{"budget": "128"}, {"prefill": "bounded"}, {"model": "Other"}, {"weights": "sha256:1"}, {"policy": "tova"}],
)
def test_runs_of_two_suites_that_differ_in_more_than_the_suite_are_no_mean(tmp_path, other):
    joint_runs(tmp_path / "one")
    joint_runs(tmp_path / "two", **other)
    both = tmp_path / "both"
    for name, suite in (("one", "a"), ("two", "b")):
        (both / name).mkdir(parents=True)
        (tmp_path / name / suite).rename(both / name / suite)
    joint_runs(both, (1, 1), (1, 1), policy="full", budget=None)
    assert against_published(both, [published(suite="a+b", task="mean")]) == []


def test_a_share_of_a_length_is_a_number_of_entries(tmp_path):
    write(tmp_path, right(45), policy="h2o", budget="128")
    full(tmp_path)
    entry = published(budget="25%", share_of="length", protocol={"context": 512}, value=75.0, full=100.0)
    assert one(tmp_path, entry).here == 0.75
    assert against_published(tmp_path, [published(budget="25%", protocol={"context": 512})]) == []
    write(tmp_path / "share", right(45), policy="h2o", budget="25%")
    found = one(tmp_path / "share", entry)
    assert "budget (25% of the tokens seen here, 128 entries there)" in found.why


def test_a_name_of_lm_eval_s_own_may_stand_with_or_without_its_beginning(tmp_path):
    write(tmp_path, right(45), policy="h2o", suite="lm-eval-niah")
    full(tmp_path, suite="lm-eval-niah")
    for suite in ("niah", "lm-eval-niah"):
        assert one(tmp_path, published(suite=suite)).suite == "lm-eval-niah"


def test_a_protocol_may_hold_two_values_to_be_alike(tmp_path):
    write(tmp_path, right(45), policy="h2o")
    full(tmp_path)
    assert one(tmp_path, published(protocol={"prefill": "masked or native"})).quantity == "retention"
    assert (
        "prefill (dense here, masked or bounded there)"
        in one(tmp_path, published(protocol={"prefill": "masked or bounded"})).why
    )


# Several trainings


def trainings(root, counts, first=0, **what):
    for number, count in enumerate(counts, first):
        write(root, right(count), policy="h2o", policy_weights={"sha256": f"scorer {number}", "variant": ""}, **what)


def test_trainings_are_one_row_with_their_deviation_where_it_is_asked_for(tmp_path):
    trainings(tmp_path, (42, 45, 48))
    full(tmp_path)
    entry = published(trained="scorer", value=75.0, full=100.0)
    apart = against_published(tmp_path, [entry], 0.2)
    assert sorted(finding.here for finding in apart) == [0.7, 0.75, 0.8]
    assert {(finding.trainings, finding.deviation) for finding in apart} == {(1, None)}
    found = one(tmp_path, entry, trainings=True)
    assert (found.here, found.trainings, found.samples) == (0.75, 3, 60)
    assert found.deviation == pytest.approx(0.05)
    assert "the mean of 3 trainings, whose scores' standard deviation is 5.0%" in found.why
    # The mean of three is known to within .05 / sqrt(3), and so less surely than one training seems to be.
    single = next(finding for finding in apart if finding.here == 0.75)
    assert found.p > single.p


def test_fine_tuned_models_of_several_trainings_are_one_row(tmp_path):
    for number, count in enumerate((42, 48)):
        fine_tuned(tmp_path, right(count), number, model=f"model-{number}")
    full(tmp_path)
    found = one(tmp_path, TUNED, trainings=True)
    assert (found.here, found.trainings) == (0.75, 2)


def test_runs_that_differ_in_more_than_their_weights_are_rows_of_their_own(tmp_path):
    trainings(tmp_path, (42,))
    trainings(tmp_path / "seed", (45,), seed=1)
    trainings(tmp_path / "settings", (48,), settings={"group": "sum"})
    write(tmp_path / "untrained", right(40), policy="h2o")
    full(tmp_path)
    found = against_published(tmp_path, [published(trained="scorer")], 0.2, trainings=True)
    assert {finding.trainings for finding in found} == {1}


def test_a_baseline_takes_the_mean_of_trainings_on_both_sides(gate, tmp_path):
    trainings(tmp_path / "here", (20, 24))
    trainings(tmp_path / "there", (50, 54, 52), first=5)
    code, _, err = gate(tmp_path / "here", "--baseline", tmp_path / "there")
    assert code == 2
    assert "--trainings" in err
    code, out, _ = gate(tmp_path / "here", "--baseline", tmp_path / "there", "--trainings", "--json")
    score = next(finding for finding in json.loads(out)["findings"] if finding["quantity"] == "score")
    assert (code, score["trainings"]) == (1, 2)
    assert score["here"] == pytest.approx(22 / 60)
    assert score["there"] == pytest.approx(52 / 60)
    assert "the mean of 2 trainings, whose scores' standard deviation is 4.7 points" in score["why"]


def test_a_fine_tuned_model_s_own_weights_may_differ_from_the_baseline_s(gate, tmp_path):
    fine_tuned(tmp_path / "here", right(50), 1)
    fine_tuned(tmp_path / "there", right(50), 2)
    assert gate(tmp_path / "here", "--baseline", tmp_path / "there")[0] == 0
    write(tmp_path / "plain", right(50), weights="sha256:other")
    code, _, err = gate(tmp_path / "here", "--baseline", tmp_path / "plain")
    assert code == 2
    assert "the model is org/Tiny here and Tiny there" in err


def test_trainings_with_other_samples_are_a_sentence(gate, tmp_path):
    trainings(tmp_path / "here", (20,))
    write(tmp_path / "here", right(20, of=50), policy="h2o", policy_weights=SCORER)
    trainings(tmp_path / "there", (20,))
    code, _, err = gate(tmp_path / "here", "--baseline", tmp_path / "there", "--trainings")
    assert code == 2
    assert "do not have the same samples" in err


# The command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--published", "--base", "Tiny"], "--base takes MODEL=BASE"),
        (["--published", "--base", "a=b", "--base", "a=c"], "--base names two bases of a: b and c"),
        (["--published", "--base", "a=b"], "is of the model a, whose base is named"),
        (["--baseline", "x", "--base", "a=b"], "it is about --published"),
        (["--baseline", "x", "--exact", "--trainings"], "--exact compares single ones"),
    ],
)
def test_options_that_cannot_work_are_a_sentence(gate, tmp_path, words, said):
    full(tmp_path / "runs")
    code, _, err = gate(tmp_path / "runs", *words)
    assert code == 2
    assert said in err


def test_the_command_takes_trainings_and_bases(gate, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "read_published", lambda: (TUNED,))
    for number, count in enumerate((42, 48)):
        write(tmp_path / "runs", right(count), model=f"tuned-{number}", weights=f"sha256:{number + 1}")
    full(tmp_path / "runs")
    bases = ["--base", "tuned-0=Tiny", "--base", "tuned-1=Tiny"]
    code, out, _ = gate(tmp_path / "runs", "--published", "--trainings", "--tolerance", "0.2", "--json", *bases)
    found = json.loads(out)["findings"]
    assert (code, len(found), found[0]["trainings"], found[0]["here"]) == (0, 1, 2, 0.75)
