"""`evictbench gate RUNS --baseline OTHER`, from files to exit codes."""

import json

import pytest
from gate.gate_cases import right, sample, steps, write_run, write_trace
from plot.plot_records import write_grid

DOCUMENTS = 100


@pytest.fixture
def folders(tmp_path):
    """h2o is 30 points worse here than there, tova the same, and the full cache the same."""
    for side, count in (("here", 40), ("there", 70)):
        root = tmp_path / side
        write_run(root, right(count, DOCUMENTS), policy="h2o")
        write_run(root, right(60, DOCUMENTS), policy="tova")
        write_run(root, right(90, DOCUMENTS, occupancy=500.0), policy="full", budget=None)
    return tmp_path / "here", tmp_path / "there"


def test_a_significant_drop_fails_and_nothing_else_does(gate, folders):
    code, out, err = gate(folders[0], "--baseline", folders[1], "--json", "--quiet")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert found["passed"] is False
    assert [(one["cell"], one["quantity"]) for one in found["findings"] if one["fails"]] == [("h2o @ 64", "score")]
    drop = next(one for one in found["findings"] if one["fails"])
    assert (drop["here"], drop["there"], drop["samples"]) == (0.4, 0.7, DOCUMENTS)
    assert drop["difference"] == pytest.approx(-0.3)
    assert drop["low"] < -0.3 < drop["high"]
    assert "dropped by 30.0 points on the same 100 documents" in drop["why"]


def test_what_is_better_passes_and_what_is_tolerated_does(gate, folders):
    assert gate(folders[1], "--baseline", folders[0])[0] == 0
    assert gate(folders[0], "--baseline", folders[1], "--tolerance", "0.4")[0] == 0
    assert gate(folders[0], "--baseline", folders[1], "--policy", "tova")[0] == 0


def test_repeats_are_not_documents(gate, tmp_path):
    """Four documents with sixteen answers each are four documents: a gate of one cell asks for six."""
    for side, score in (("here", 0.0), ("there", 1.0)):
        lines = [sample(doc_id, score, repeat=repeat) for doc_id in range(4) for repeat in range(16)]
        write_run(tmp_path / side, lines)
    code, _, err = gate(tmp_path / "here", "--baseline", tmp_path / "there")
    assert code == 2
    assert "has 4 documents to compare, and a drop cannot be shown with fewer than 6" in err


def test_samples_that_one_side_has_more_of_are_refused_unless_paired(gate, tmp_path):
    write_run(tmp_path / "here", right(8, 10))
    write_run(tmp_path / "there", right(15, 20))
    code, _, err = gate(tmp_path / "here", "--baseline", tmp_path / "there")
    assert code == 2
    assert "10 of 20 samples are not in both; document 10 of niah is in the baseline alone" in err
    code, out, _ = gate(tmp_path / "here", "--baseline", tmp_path / "there", "--paired", "--json")
    assert code == 0
    assert {one["samples"] for one in json.loads(out)["findings"]} == {10}


def test_a_run_that_may_give_other_results_has_another_fingerprint_and_is_compared_all_the_same(gate, tmp_path):
    """The weights and settings of a policy, and the version of results, are what such a gate is about."""
    write_run(tmp_path / "here", right(60, 100), settings={"group": "max"})
    write_run(tmp_path / "there", right(60, 100))
    assert gate(tmp_path / "here", "--baseline", tmp_path / "there")[0] == 0


def test_occupancy_and_bytes_above_the_baseline_fail(gate, tmp_path):
    write_run(tmp_path / "here", right(60, 100, occupancy=66.0))
    write_run(tmp_path / "there", right(60, 100, occupancy=64.0))
    code, out, _ = gate(tmp_path / "here", "--baseline", tmp_path / "there", "--json")
    assert code == 1
    fails = {one["quantity"]: one["why"] for one in json.loads(out)["findings"] if one["fails"]}
    assert fails.keys() == {"occupancy", "bytes"}
    assert "risen by 3.1%, and 100 of 100 documents hold more" in fails["occupancy"]


def test_longer_answers_are_no_worse_cache(gate, tmp_path):
    """Every other answer is longer here and holds more; those that are as long hold as much."""
    longer = [
        line | ({"output_tokens": 9, "occupancy_mean": 90.0} if line["doc_id"] % 2 else {}) for line in right(60, 100)
    ]
    write_run(tmp_path / "here", longer)
    write_run(tmp_path / "there", right(60, 100))
    assert gate(tmp_path / "here", "--baseline", tmp_path / "there")[0] == 0


def test_an_arm_above_the_full_cache_warns_and_passes(gate, tmp_path):
    for side in ("here", "there"):
        write_run(tmp_path / side, right(90, 100), policy="h2o")
        write_run(tmp_path / side, right(50, 100, occupancy=500.0), policy="full", budget=None)
    code, out, _ = gate(tmp_path / "here", "--baseline", tmp_path / "there", "--json")
    assert code == 0
    warning = next(one for one in json.loads(out)["findings"] if one["status"] == "warning")
    assert (warning["cell"], warning["quantity"], warning["fails"]) == ("h2o @ 64", "above full", False)
    assert "40.0 points above the full cache" in warning["why"]


def test_cells_that_differ_in_context_alone_are_paired_each_with_its_own(gate, tmp_path):
    for side in ("here", "there"):
        for context, count in ((512, 60), (1024, 40)):
            write_run(tmp_path / side, right(count, 100), context=context)
    code, out, _ = gate(tmp_path / "here", "--baseline", tmp_path / "there", "--json")
    assert code == 0
    assert {one["suite"] for one in json.loads(out)["findings"]} == {"ruler, context 512", "ruler, context 1024"}


def test_tasks_weigh_alike(gate, tmp_path):
    """20 documents of one task fall from 1 to 0 and 80 of another stay: half the mean is lost."""
    for side, score in (("here", 0.0), ("there", 1.0)):
        lines = [sample(number, score, task="vt") for number in range(20)] + right(80, 80)
        write_run(tmp_path / side, lines, tasks=("vt", "niah"))
    code, out, _ = gate(tmp_path / "here", "--baseline", tmp_path / "there", "--json")
    assert code == 1
    drop = next(one for one in json.loads(out)["findings"] if one["fails"])
    assert (drop["task"], drop["here"], drop["there"]) == ("mean", 0.5, 1.0)


# -- latency ----------------------------------------------------------------------------------------------------------


def slower(by, **settings):
    """A trace in which a step under a budget takes `by` times as long."""
    found = steps(**settings, new=64)
    of_policy = found["budget"].notna() & (found["phase"] == "decode")
    found.loc[of_policy, "ms"] *= by
    return found


@pytest.mark.parametrize(("by", "options", "code"), [(1.0, (), 0), (1.05, (), 0), (1.3, (), 1), (0.5, (), 0)])
def test_a_step_that_is_slower_beside_the_full_cache_fails(gate, tmp_path, by, options, code):
    here, there = (write_trace(tmp_path / side / "trace", slower(factor)) for side, factor in (("a", by), ("b", 1.0)))
    found, out, err = gate(here.parent, "--baseline", there.parent, "--json", "--quiet", *options)
    assert (found, err) == (code, "")
    finding = json.loads(out)["findings"][0]
    assert (finding["cell"], finding["quantity"]) == ("h2o @ 64", "latency")
    assert finding["here"] / finding["there"] == pytest.approx(by)


def test_the_latency_tolerance_is_what_it_says(gate, tmp_path):
    here, there = (write_trace(tmp_path / side / "trace", slower(factor)) for side, factor in (("a", 1.3), ("b", 1.0)))
    assert gate(here.parent, "--baseline", there.parent, "--latency-tolerance", "0.5")[0] == 0


def test_a_machine_that_is_slower_as_a_whole_is_no_slower_policy(gate, tmp_path):
    whole = slower(1.0)
    whole["ms"] *= 3
    here, there = write_trace(tmp_path / "a" / "t", whole), write_trace(tmp_path / "b" / "t", slower(1.0))
    assert gate(here.parent, "--baseline", there.parent)[0] == 0


def test_noise_of_single_steps_is_no_slower_policy(gate, tmp_path):
    import numpy as np

    draw = np.random.default_rng(0)
    noisy = slower(1.05)
    noisy["ms"] *= np.exp(draw.normal(0, 0.3, len(noisy)))
    here, there = write_trace(tmp_path / "a" / "t", noisy), write_trace(tmp_path / "b" / "t", slower(1.0))
    assert gate(here.parent, "--baseline", there.parent)[0] == 0


def test_running_out_of_memory_where_the_baseline_did_not_fails(gate, tmp_path):
    here = write_trace(tmp_path / "a" / "t", slower(1.0, lost=[("h2o", 256, 1)]))
    there = write_trace(tmp_path / "b" / "t", slower(1.0))
    code, out, _ = gate(here.parent, "--baseline", there.parent)
    assert code == 1
    assert "Ran out of memory here, and not in the baseline." in out


def test_traces_may_lie_apart_from_the_runs(gate, tmp_path):
    write_grid(tmp_path / "here")
    write_grid(tmp_path / "there")
    traces = [write_trace(tmp_path / name, slower(by)) for name, by in (("a", 1.3), ("b", 1.0))]
    words = (tmp_path / "here", "--baseline", tmp_path / "there", "--trace", traces[0], "--baseline-trace", traces[1])
    code, out, _ = gate(*words, "--json")
    assert code == 1
    assert [one["quantity"] for one in json.loads(out)["findings"] if one["fails"]] == ["latency"]
