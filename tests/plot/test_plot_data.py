"""The numbers of the figures of runs: against the samples they come from, by hand."""

import pytest
from plot_records import right, sample, write_run

import evictbench
from evictbench.errors import UserError
from evictbench.plot.data import budget_points, error_modes, fidelity_points
from evictbench.stats.intervals import mean_interval, mean_of_means
from evictbench.store.select import check_one_protocol, choose, common_tasks, paired_documents, uneven_tasks


def read(root):
    return evictbench.results(root, text=False)


def test_points_are_means_over_tasks_with_their_interval(tmp_path):
    write_run(tmp_path, right(3, 10) + right(8, 8, task="vt"), tasks=("niah", "vt"))
    (point,) = budget_points({"": read(tmp_path)}).to_dict("records")
    niah, vt = [1.0] * 3 + [0.0] * 7, [1.0] * 8
    value, (low, high) = mean_of_means([(0.3, mean_interval(niah)), (1.0, mean_interval(vt))])
    assert (point["value"], point["low"], point["high"]) == pytest.approx((value, low, min(1.0, high)))
    assert (point["tasks"], point["documents"], point["entries"], point["cache_bytes"]) == (2, 18, 64.0, 64000)


def test_where_budgets_stand(tmp_path):
    """A number where it is a bound; what was measured for a share, and where nothing bounds."""
    write_run(tmp_path, right(1, 4, occupancy=60.0), budget="64")
    write_run(tmp_path, right(1, 4, occupancy=125.0), budget="25%")
    write_run(tmp_path, right(1, 4, occupancy=40.0), policy="dms", budget="32")
    write_run(tmp_path, right(1, 4, occupancy=30.0), policy="snapkv", budget="32")
    write_run(tmp_path, right(1, 4, occupancy=29.0), policy="snapkv:decode=reselect", budget="32")
    write_run(tmp_path, right(1, 4, occupancy=31.0), policy="another", budget="32")
    write_run(tmp_path, right(1, 4, occupancy=500.0), policy="full", budget=None)
    points = budget_points({"": read(tmp_path)}).set_index(["policy", "budget"])["entries"]
    assert points[("h2o", "64")] == 64
    assert points[("h2o", "25%")] == 125
    assert points[("dms", "32")] == 40
    assert points[("snapkv", "32")] == 30
    assert points[("snapkv:decode=reselect", "32")] == 32
    assert points[("another", "32")] == 32
    assert points.isna().sum() == 1


def test_runs_of_one_policy_that_differ_in_tasks_are_one_point(tmp_path):
    write_run(tmp_path, right(2, 4), tasks=("niah",))
    write_run(tmp_path, right(2, 4) + right(4, 4, task="vt"), tasks=("niah", "vt"))
    frame = read(tmp_path)
    check_one_protocol(frame, "here")
    (point,) = budget_points({"": frame}).to_dict("records")
    assert (point["value"], point["documents"]) == (0.75, 8)


def test_error_modes_and_score_add_up(tmp_path):
    samples = [
        sample(0, 0.0, repetition=True, truncated=True),
        sample(1, 0.0, truncated=True),
        sample(2, 0.5),
        sample(3, 1.0, truncated=True),
    ]
    write_run(tmp_path, samples + right(1, 2, task="vt"), tasks=("niah", "vt"))
    (row,) = error_modes({"": read(tmp_path)}).to_dict("records")
    assert row["repetition"] == 0.25 / 2
    assert row["over_long"] == 0.25 / 2
    assert row["wrong"] == (0.125 + 0.5) / 2
    assert row["score"] == (0.375 + 0.5) / 2
    assert sum(row[name] for name in ("repetition", "over_long", "wrong", "score")) == pytest.approx(1)


def test_fidelity_has_a_panel_for_each_of_its_two_measures(tmp_path):
    samples = [sample(doc, 0.9, metrics={"kl": 0.1 * doc, "ppl_ratio": 1.0 + doc}) for doc in range(3)]
    write_run(tmp_path, samples, suite="fidelity")
    points = fidelity_points({"": read(tmp_path)}).set_index("panel")
    assert points.loc["KL", "value"] == pytest.approx(0.1)
    assert points.loc["perplexity ratio", "value"] == pytest.approx(2)
    assert points.loc["perplexity ratio", "high"] > 2


PROTOCOLS = [
    ({"question": "seen"}, r"question is (un)?seen \(h2o 64\) and (un)?seen \(tova 64\)\. .*--by question"),
    ({"seed": 1}, "seed is"),
    ({"dtype": "bfloat16"}, "dtype is"),
    ({"weights": "sha256:1"}, "weights is"),
    ({"temperature": 0.6}, r"temperature is .*0\.6"),
    ({"context": 1024}, "context is"),
    ({"prefill": "bounded", "chunk": 512}, r"prefill is .*bounded \(tova 64\)"),
    ({"data": {"generator": "version 2"}}, "the data of generator is version [12] and version [12]"),
    ({"question": "seen", "seed": 1}, "question is .*; seed is"),
]


@pytest.mark.parametrize(("changes", "sentence"), PROTOCOLS)
def test_two_protocols_are_refused_with_what_differs(tmp_path, changes, sentence):
    write_run(tmp_path, right(1, 2))
    write_run(tmp_path, right(1, 2), policy="tova", **changes)
    with pytest.raises(UserError, match=f"Runs of two protocols .*here.*{sentence}"):
        check_one_protocol(read(tmp_path), "here")


def test_a_task_of_two_versions_is_refused(tmp_path):
    write_run(tmp_path, right(1, 2))
    write_run(tmp_path, right(1, 2), policy="tova", tasks={"niah": "2.0"})
    with pytest.raises(UserError, match=r"the version of niah is [12]\.0"):
        check_one_protocol(read(tmp_path), "here")


def test_the_full_cache_may_have_any_prefill_and_data_of_other_tasks_may_differ(tmp_path):
    write_run(tmp_path, right(1, 2), prefill="bounded", chunk=512)
    write_run(tmp_path, right(1, 2), policy="full", budget=None, data={"generator": "version 1", "essays": "a"})
    check_one_protocol(read(tmp_path), "here")


def test_what_is_meant_may_differ_between_policies_but_not_within_one(tmp_path):
    write_run(tmp_path, right(1, 2))
    write_run(tmp_path, right(1, 2), policy="tova", prefill="dense")
    check_one_protocol(read(tmp_path), "here", ["prefill"])
    write_run(tmp_path, right(1, 2), prefill="dense")
    with pytest.raises(UserError, match=r"h2o 64 stands for two things .*prefill is"):
        check_one_protocol(read(tmp_path), "here", ["prefill"])


def test_one_label_for_two_settings_or_weights_is_refused(tmp_path):
    write_run(tmp_path, right(1, 2), settings={"group": "mean"})
    write_run(tmp_path, right(1, 2), settings={"group": "max"})
    with pytest.raises(UserError, match=r"h2o 64 stands for two things .*policy_settings"):
        check_one_protocol(read(tmp_path), "here")


def test_filters_take_words_and_name_the_near_ones(tmp_path):
    write_run(tmp_path, right(1, 2))
    write_run(tmp_path, right(1, 2), policy="tova", budget="25%")
    write_run(tmp_path, right(1, 2), policy="full", budget=None)
    frame = read(tmp_path)
    assert set(choose(frame, {"policy": ["tova", "h2o"]})["policy"]) == {"tova", "h2o"}
    assert set(choose(frame, {"budget": ["none"]})["policy"]) == {"full"}
    assert len(choose(frame, {"chat": ["no"], "context": ["512"], "temperature": ["0"]})) == 6
    with pytest.raises(UserError, match=r"Unknown task 'niha' in these results: did you mean niah\?"):
        choose(frame, {"task": ["niha"]})
    with pytest.raises(UserError, match=r"Unknown column 'questoin': did you mean question\?"):
        choose(frame, {"questoin": ["seen"]})
    with pytest.raises(UserError, match="No sample with budget 64 is among those"):
        choose(frame, {"policy": ["full"], "budget": ["64"]})


def test_tasks_that_not_all_have_are_left_out(tmp_path):
    write_run(tmp_path, right(1, 2) + right(1, 2, task="vt"), tasks=("niah", "vt"))
    write_run(tmp_path, right(1, 2), policy="tova")
    kept, sentences = common_tasks(read(tmp_path))
    assert set(kept["task"]) == {"niah"}
    assert sentences == ["vt is left out: 1 of 2 policies and budgets have samples of it."]


def test_no_task_in_common_is_a_sentence(tmp_path):
    write_run(tmp_path, right(1, 2))
    write_run(tmp_path, right(1, 2, task="vt"), policy="tova", tasks=("vt",))
    with pytest.raises(UserError, match="No task was run under every policy and budget"):
        common_tasks(read(tmp_path))


def test_unlike_documents_are_said_and_paired_keeps_the_common_ones(tmp_path):
    write_run(tmp_path, right(1, 6))
    write_run(tmp_path, right(1, 8)[3:], policy="tova")
    frame = read(tmp_path)
    (sentence,) = uneven_tasks(frame)
    assert "same samples of niah (5 to 6 of them)" in sentence
    common = paired_documents(frame)
    assert set(common["doc_id"]) == {3, 4, 5}
    assert len(common) == 6
    assert not uneven_tasks(common)
    with pytest.raises(UserError, match="No document of niah"):
        paired_documents(frame[(frame["policy"] == "tova") ^ (frame["doc_id"] < 3)])
