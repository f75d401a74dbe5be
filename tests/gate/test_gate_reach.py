"""Every number of three papers with the run that it is about: synthetic runs, and which of them the gate pairs."""

from collections import Counter

import pytest
from plot.plot_records import sample, write_run

from evictbench.gate.arms import read_runs
from evictbench.gate.published import matched
from evictbench.gate.wanted import is_score, missing, preset_tasks, wanted
from evictbench.registry import POLICIES, names, parse_policy
from evictbench.store.published import read_published

SEEDS = ("2607.05061", "IndexMem++", "2608.08878")
"""KVpop, IndexMem++, DistillCache."""

FULL_WEIGHTS = "sha256:base"


@pytest.fixture(scope="module")
def published():
    return read_published()


@pytest.fixture(scope="module")
def scores(published):
    return [entry for entry in published if entry.paper in SEEDS and is_score(entry)]


def runs_of(entry):
    """The runs that a number is about, and the full cache beside each, as arguments of `write_run`."""
    run = wanted(entry)
    stated = run.protocol
    policy = parse_policy(run.policy)
    for suite, asked in run.suites.items():
        tasks = tuple(asked) or preset_tasks(entry, suite)
        named = ("context", "question", "temperature", "top_p", "top_k")
        protocol = {"context": None, "question": "seen"} | {name: stated[name] for name in named if name in stated}
        protocol |= {"thoughts": bool(stated.get("thinking")), "chat": bool(stated.get("chat"))}
        limit = stated.get("max_new_tokens", 16)
        common = {"suite": suite, "tasks": tasks, "limit": limit, "weights": FULL_WEIGHTS, **protocol}
        own = {"policy": policy.label, "settings": policy.settings, "budget": run.budget, "model": run.model}
        if run.trained != "none" and not (run.trained == "model" and run.policy == "streaming_llm"):
            own["policy_weights"] = {"sha256": f"scorer of {run.model}", "variant": ""}
        if run.trained == "model":
            own |= {"model": "model", "weights": f"sha256:tuned {run.policy} {run.model}"}
            own["base_model"] = {"name": run.model, "sha256": FULL_WEIGHTS, "policy": run.policy}
        yield common | own
        yield common | {"policy": "full", "settings": {}, "budget": None, "model": run.model}


@pytest.fixture(scope="module")
def rows(published, scores, tmp_path_factory):
    """What the gate pairs in a folder of all these runs, and what it refuses."""
    folder = tmp_path_factory.mktemp("runs")
    wanted_runs = {}
    for entry in scores:
        if missing(entry) is None:
            for run in runs_of(entry):
                key = str(sorted((name, str(value)) for name, value in run.items() if name != "tasks"))
                wanted_runs.setdefault(key, run | {"tasks": ()})["tasks"] += run["tasks"]
    for run in wanted_runs.values():
        tasks = tuple(dict.fromkeys(run.pop("tasks")))
        limit, full = run.pop("limit"), run["policy"] == "full"
        documents = [(task, number) for task in tasks for number in (0, 1)]
        lines = [sample(number, float(full or number == 0), task=task, token_limit=limit) for task, number in documents]
        write_run(folder, lines, tasks=tasks, **run)
    return matched(read_runs(folder), published)


def test_each_number_is_paired_with_the_run_that_it_is_about_and_with_no_other(scores, rows):
    paired, _ = rows
    found = Counter()
    for row in paired:
        for entry in row.entries:
            run = wanted(entry)
            found[entry.identity] += 1
            assert row.arm.suite == entry.suite
            assert row.arm.first.model == run.model
            assert row.arm.first.trained == entry.trained
            assert (row.arm.first.columns["policy"], row.arm.first.columns["budget"]) == (run.policy, run.budget)
            assert row.arm.first.columns["context"] == run.protocol.get("context"), entry
            assert row.here.full == 1
            assert row.here.value == 0.5
            if entry.full:
                assert row.quantity == "retention"
                assert row.low <= entry.value / entry.full <= row.high
            elif entry.metric != "retention":
                assert row.quantity == "score"
                assert row.low <= entry.value / (100 if entry.unit == "percent" else 1) <= row.high
    matchable = [entry for entry in scores if missing(entry) is None]
    # A number of another paper about the same run is one too, so seeds' numbers alone are counted.
    counted = {entry.identity: found[entry.identity] for entry in matchable}
    assert {identity: count for identity, count in counted.items() if count != 1} == {}
    others = {entry.identity for entry in scores} - counted.keys()
    assert not others & found.keys()


def test_what_no_run_can_match_is_listed_with_the_reason(scores):
    """The numbers are those that stand in docs and README: a change of one is a change of those."""
    reasons = Counter(reason for entry in scores if (reason := missing(entry)) is not None)
    no_policy = {reason: count for reason, count in reasons.items() if reason.startswith("No policy here is ")}
    assert (no_policy["No policy here is ForesightKV."], no_policy["No policy here is RLKV."]) == (17, 17)
    assert sum(no_policy.values()) == 17 + 17 + 6 + 18
    assert {reason: count for reason, count in reasons.items() if reason not in no_policy} == {
        "No suite here is livecodebench_v6.": 7,
        "The paper names no one model (not stated, a pilot configuration).": 9,
        "The paper does not state its budget.": 1,
        "Evicted entries are only masked there, and may return; a run here frees them.": 2,
    }
    ours = [entry for entry in scores if wanted(entry).policy_name in names(POLICIES)]
    matchable = sum(missing(entry) is None for entry in ours)
    assert (matchable, len(ours), len(scores)) == (191, 210, 268)
    assert matchable / len(ours) > 0.85
