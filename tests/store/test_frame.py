"""Results read back: against the lines on the disk and against the summary that a run writes."""

import importlib.util
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from plot.plot_records import identity, right, sample, write_grid, write_run

import evictbench
from evictbench.errors import UserError
from evictbench.store import run_folder
from evictbench.store.frame import COLUMNS, METRIC, RECENCY_COLUMNS, RUN_COLUMNS, cells
from evictbench.store.summary import summarise


def test_every_sample_is_a_row_and_every_column_is_documented(tmp_path):
    write_grid(tmp_path)
    frame = evictbench.results(tmp_path)
    assert len(frame) == 70
    documented = set(COLUMNS) - {"metric_<name>", *RECENCY_COLUMNS}
    assert {name for name in frame if not name.startswith(METRIC)} == documented
    assert frame["policy"].value_counts().to_dict() == {"h2o": 20, "tova": 20, "random": 20, "full": 10}
    assert frame.loc[frame["policy"] == "full", "budget"].isna().all()
    (row,) = frame[(frame["policy"] == "tova") & (frame["budget"] == "64") & (frame["doc_id"] == 3)].to_dict("records")
    assert (row["score"], row["text"], row["question"], row["cache_bytes"]) == (1.0, "it is 3", "unseen", 64000)
    assert run_folder.read_run(run_folder.Path(row["folder"]))["fingerprint"] == row["fingerprint"]


RECENCY = {"version": 1, "window": "same", "every": 32, "moments": 2, "share": 0.5, "by_layer": [0.4, None]}


def test_how_recent_the_kept_entries_were_is_read_back(tmp_path):
    measured = sample(0, 1.0, recency=RECENCY, recency_by_head=[[0.3, 0.5], [None, None]])
    folder = write_run(tmp_path, [measured, sample(1, 1.0)])
    frame = evictbench.results(tmp_path).set_index("doc_id")
    assert frame.loc[0, "recency_share"] == 0.5
    assert frame.loc[0, "recency_window"] == "same"
    assert np.array_equal(frame.loc[0, "recency_by_layer"], [0.4, np.nan], equal_nan=True)
    assert frame.loc[1, list(RECENCY_COLUMNS)].isna().all()
    assert set(RECENCY_COLUMNS) <= set(frame)
    assert run_folder.read_samples(folder)["niah", 0, 0]["recency_by_head"] == [[0.3, 0.5], [None, None]]
    assert "recency_by_head" not in run_folder.light_samples(folder, run_folder.read_run(folder))["niah", 0, 0]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"share": 1.5}, "share"),
        ({"version": 2}, "version"),
        ({"window": "0"}, "window"),
        ({"by_layer": [2.0]}, "by_layer"),
        ({"moments": 0}, "moments"),
    ],
)
def test_a_recency_that_cannot_be_is_a_sentence(tmp_path, wrong, sentence):
    write_run(tmp_path, [sample(0, 1.0, recency=RECENCY | wrong)])
    with pytest.raises(UserError, match=sentence):
        evictbench.results(tmp_path)


def test_text_is_left_out_where_it_is_not_wanted(tmp_path):
    write_run(tmp_path, right(1, 2))
    assert not {"text", "answer"} & set(evictbench.results(tmp_path, text=False))


def test_metrics_of_different_tasks_stand_beside_each_other(tmp_path):
    write_run(tmp_path, [sample(0, 0.5, metrics={"kl": 1, "agreement": 0.5})], suite="fidelity")
    write_run(tmp_path, [sample(0, 0.5, metrics={"kl": 0.25, "ppl_ratio": 2.0})], suite="fidelity", budget="9")
    write_run(tmp_path, right(1, 1))
    frame = evictbench.results(tmp_path).set_index(["suite", "budget"])
    assert frame.loc[("fidelity", "64"), "metric_kl"].item() == 1.0
    assert frame.loc[("fidelity", "9"), "metric_ppl_ratio"].item() == 2.0
    assert frame.loc[("ruler", "64"), ["metric_kl", "metric_agreement"]].isna().all(axis=None)


def test_a_text_that_looks_like_a_field_is_read_whole(tmp_path):
    text = 'He said "tokens": [1, 2], "by_position": {}, "prompt_ids": "x", and {"prompt_ids": null, ]}'
    write_run(tmp_path, [sample(0, 1.0, text=text), sample(1, 0.0, text="\\")])
    assert evictbench.results(tmp_path)["text"].tolist() == [text, "\\"]


def test_a_lone_surrogate_is_read(tmp_path):
    write_run(tmp_path, [sample(0, 1.0, text="half \ud83d of a smile")])
    assert evictbench.results(tmp_path)["text"].tolist() == ["half ? of a smile"]


@pytest.mark.parametrize("tail", ['{"task": "niah", "doc', '{"task": "niah", "doc\n', "\0\0\0\n"])
def test_a_torn_last_line_is_left_out(tmp_path, tail):
    path = write_run(tmp_path, right(2, 3))
    with (path / run_folder.SAMPLES).open("a") as file:
        file.write(tail)
    assert evictbench.results(tmp_path)["score"].tolist() == [1.0, 1.0, 0.0]


def test_a_sample_that_was_written_twice_counts_once(tmp_path):
    write_run(tmp_path, [sample(0, 1.0), sample(0, 1.0), sample(0, 0.5, repeat=1)])
    assert evictbench.results(tmp_path)["score"].tolist() == [1.0, 0.5]


def test_a_copy_of_a_run_counts_once_and_hidden_folders_are_not_read(tmp_path):
    path = write_run(tmp_path, right(1, 2))
    shutil.copytree(path, tmp_path / "copy")
    shutil.copytree(path, path / ".shards" / "1-of-2")
    (path / ".shards" / "1-of-2" / run_folder.RUN).unlink()
    frame = evictbench.results(tmp_path)
    assert len(frame) == 2
    assert len(cells(frame)) == 1


def test_what_cannot_be_read_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="There is no folder"):
        evictbench.results(tmp_path / "nowhere")
    with pytest.raises(UserError, match="There are no results in"):
        evictbench.results(tmp_path)
    path = write_run(tmp_path, [])
    with pytest.raises(UserError, match="No sample is finished yet"):
        evictbench.results(tmp_path)
    lines = [json.dumps(sample(number, 1.0, session=0)) for number in range(3)]
    (path / run_folder.SAMPLES).write_text("\n".join([lines[0], lines[1][:40], lines[2], ""]))
    with pytest.raises(UserError, match=r"Line 2 of .*samples.jsonl is damaged"):
        evictbench.results(tmp_path)
    (path / run_folder.RUN).write_text('{"results_version": 1,')
    with pytest.raises(UserError, match=r"run\.json is damaged \(it is not JSON"):
        evictbench.results(tmp_path)
    (path / run_folder.RUN).unlink()
    with pytest.raises(UserError, match=r"holds samples but no run\.json"):
        evictbench.results(tmp_path)


def test_a_run_json_without_what_it_needs_is_a_sentence(tmp_path):
    path = write_run(tmp_path, right(1, 1))
    run = json.loads((path / run_folder.RUN).read_text())
    del run["identity"]["dtype"]
    (path / run_folder.RUN).write_text(json.dumps(run))
    with pytest.raises(UserError, match=r"run\.json is damaged \(object missing required field dtype at identity"):
        evictbench.results(tmp_path)


def test_cells_have_the_scores_and_intervals_of_the_summary(tmp_path):
    samples = [sample(doc, (doc * 7 + repeat) % 3 / 2, repeat=repeat) for doc in range(7) for repeat in range(3)]
    samples += right(4, 9, task="vt")
    samples += [sample(doc, 0.25, task="fwe", truncated=doc == 1) for doc in range(4)]
    write_run(tmp_path, samples, tasks=("niah", "vt", "fwe"))
    want = summarise(samples, {"niah": 21, "vt": 9, "fwe": 4})["tasks"]
    found = cells(evictbench.results(tmp_path)).set_index("task")
    for task, row in want.items():
        assert found.loc[task, "score"] == pytest.approx(row["score"], abs=1e-12)
        assert tuple(found.loc[task, ["low", "high"]]) == pytest.approx(row["interval"], abs=1e-12)
        for name in ("documents", "samples", "occupancy_max", "occupancy_mean", "cache_bytes", "truncated"):
            assert found.loc[task, name] == pytest.approx(row[name])


def test_cells_of_another_metric_have_an_interval_of_its_own(tmp_path):
    samples = [sample(doc, 0.5, metrics={"kl": float(doc)}) for doc in range(5)] + right(1, 2, task="vt")
    write_run(tmp_path, samples, tasks=("niah", "vt"))
    frame = evictbench.results(tmp_path)
    found = cells(frame, "kl")
    want = summarise(samples[:5], {"niah": 5})["tasks"]["niah"]["metrics"]["kl"]
    assert found["task"].tolist() == ["niah"]
    assert (found["kl"].item(), found["low"].item()) == pytest.approx((want["mean"], want["interval"][0]))
    with pytest.raises(UserError, match=r"Unknown metric 'kel': did you mean kl\?"):
        cells(frame, "kel")


def test_one_document_has_no_interval(tmp_path):
    write_run(tmp_path, right(1, 1))
    assert cells(evictbench.results(tmp_path))[["low", "high"]].isna().all(axis=None)


def test_the_run_columns_are_what_the_fingerprint_is_made_of():
    """A part of the identity that no column holds could differ unseen."""
    whole = identity()
    named = {"policy": {"policy", "policy_name", "policy_settings", "policy_source"}, "tasks": {"fingerprint"}}
    for name in whole.keys() - {"protocol"}:
        assert named.get(name, {name}) <= set(RUN_COLUMNS)
    assert whole["protocol"].keys() - {"name"} <= set(RUN_COLUMNS)


def test_the_function_wins_over_the_data_folder_of_its_name():
    assert callable(evictbench.results)
    spec = importlib.util.find_spec("evictbench.results")
    assert spec is not None
    assert spec.submodule_search_locations
    assert callable(evictbench.results)


def test_reading_results_imports_no_torch(tmp_path):
    write_run(tmp_path, right(1, 2))
    code = (
        "import sys, evictbench; from evictbench.store.frame import cells; "
        f"cells(evictbench.results({str(tmp_path)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_whole_number_that_no_integer_of_arrow_holds_is_read(tmp_path):
    """A time of 10^20 s is absurd and no damage: it is shown as it stands."""
    write_run(tmp_path, [sample(0, 1.0, prefill_seconds=10**20)])
    assert evictbench.results(tmp_path)["prefill_seconds"].tolist() == [1e20]
