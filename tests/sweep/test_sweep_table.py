"""What a sweep shows, and what its command refuses."""

import copy
import dataclasses
import importlib.util
import io
import json
import re
from types import SimpleNamespace

import pytest
from executor_in_process import InProcess
from plot.plot_records import sample
from rich.console import Console

from evictbench.cli import sweep as sweep_command
from evictbench.cli.sweep import SweepOptions, sweep_and_show
from evictbench.cli.sweep_output import SweepTable, live_table, result_table, status_line
from evictbench.errors import UserError
from evictbench.store import run_folder
from evictbench.sweep.grid import grid_cells, parse_grid
from evictbench.sweep.job import Job, JobWatcher
from evictbench.sweep.local import worker_devices
from evictbench.sweep.plan import plan_cells, sweep
from evictbench.sweep.progress import Progress


@pytest.fixture
def words(model, tmp_path):
    return {
        "policies": "h2o,tova",
        "budgets": "16,32",
        "suites": "toy",
        "model": model,
        "out": tmp_path / "runs",
        "device": "cpu",
        "limit": 2,
    }


@pytest.fixture
def cells(words):
    return plan_cells(grid_cells(parse_grid(words)))[0]


def text_of(table, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def job_of(cell, index):
    folder = cell.plan.folder
    return Job(index, cell.title, cell.plan.settings, folder, folder, 0, 1, "this", folder)


def line_of(planned, score):
    task, doc_id, repeat = planned.key
    return json.dumps(sample(doc_id, score, task=task, repeat=repeat, session=0)) + "\n"


def test_progress_is_read_from_the_disk_line_by_line(cells):
    now = [100.0]
    progress = Progress(cells, lambda: now[0])
    cell, job = cells[1], job_of(cells[1], 1)
    folder = cell.plan.folder
    folder.mkdir(parents=True)
    progress.started(job)
    watcher = JobWatcher(job)
    watcher.phase("loading the weights")
    progress.update()
    assert "loading the weights" in text_of(live_table(progress, 40))
    assert progress.left(cell) is None
    watcher.start([], 4)
    progress.update()
    first, second, *_ = cell.plan.prompts
    samples = folder / run_folder.SAMPLES
    whole = line_of(first, 1.0) + line_of(second, 0.5)
    samples.write_text(whole[:-9])  # the second one is under way
    now[0] += 10
    progress.update()
    assert (cell.done, cell.made, cell.score()) == (1, 1, 1.0)
    assert cell.rate(now[0]) == pytest.approx(0.1)
    assert progress.left(cell) == pytest.approx(30)
    samples.write_text(whole)
    progress.update()
    assert (cell.done, cell.score()) == (2, 0.75)
    table = text_of(live_table(progress, 40))
    assert "running" in table
    assert "2/4" in table
    assert "12/min" in table
    assert "0:10" in table
    assert status_line(progress) == "0/5 cells, 2/20 samples, 1:30 left"
    watcher.close()
    progress.ended(job)


def test_a_long_table_keeps_to_the_screen(cells):
    many = [copy.copy(cells[index % 5]) for index in range(200)]
    assert len(text_of(live_table(Progress(many), 20)).splitlines()) <= 20 + 2
    for index, cell in enumerate(many):
        cell.state = "done" if index < 90 else "running" if index < 92 else "failed" if index == 92 else "waiting"
    table = text_of(live_table(Progress(many), 24))
    assert len(table.splitlines()) <= 24 + 2
    assert table.count("running") == 2
    assert table.count("failed") == 2  # in the heading too
    assert "107 waiting in all" in table


def test_in_a_file_there_is_a_line_for_each_cell_that_ends(cells):
    console = Console(file=io.StringIO(), width=120)
    with SweepTable(console) as table:
        sweep(cells, InProcess(), table)
        table.warn("once")
        table.warn("once")
    lines = console.file.getvalue().splitlines()
    assert [line.split(":")[1].strip() for line in lines if line.startswith("done")] == [cell.title for cell in cells]
    assert lines[-1] == "warning: once"
    assert "\x1b" not in console.file.getvalue()


def test_on_a_terminal_the_table_is_live(cells):
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True)
    with SweepTable(console) as table:
        table.phase("planning cell 1 of 5")
        sweep(cells, InProcess(), table)
    shown = console.file.getvalue()
    for said in ("planning cell 1 of 5", "h2o", "waiting", "running", "done", "cells,"):
        assert said in shown, said


def test_a_dry_run_shows_all_and_runs_nothing(words, capsys, tmp_path):
    three = words | {"policies": "h2o,tova,streaming_llm", "budgets": "2,32"}
    with pytest.raises(UserError, match="1 of 7 cells cannot be; --skip-impossible leaves them out"):
        sweep_and_show(None, three, SweepOptions(dry_run=True), False)
    out = capsys.readouterr().out
    for said in (
        "impossible: streaming_llm at 2 on toy: streaming_llm needs",
        "6 cells, 24 samples to make",
        "assumed",
    ):
        assert said in out, said
    assert not (tmp_path / "runs").exists()
    how = SweepOptions(dry_run=True, skip_impossible=True)
    assert sweep_and_show(None, words | {"policies": "streaming_llm", "budgets": "2,32"}, how, True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["waiting", "waiting", "impossible"]
    assert rows[1]["estimate"]["samples"] == 4


def test_a_sweep_says_what_it_runs_with_its_defaults(words, capsys):
    assert sweep_and_show(None, words | {"policies": "h2o"}, SweepOptions(dry_run=True, shards=2), False) == 0
    out = capsys.readouterr().out
    for line in (
        "sweep:",
        "  model     tiny, float32, device cpu, 8 rows",
        "  policy    full; h2o (group=mean, shares=head)",
        "  budget    none; 16 entries per KV head; 32 entries per KV head",
        "  prefill   native (nothing is cut), chunks of 512 tokens; native (dense), chunks of 512 tokens",
        "  cells     3, 12 samples",
        "  workers   local: 1, on cpu; each cell in 2 shards",
    ):
        assert line in out.splitlines(), line
    assert out.splitlines()[-1].startswith("next: evictbench")
    assert sweep_and_show(None, words | {"policies": "h2o"}, SweepOptions(dry_run=True, quiet=True), False) == 0
    assert "sweep:" not in capsys.readouterr().out


def test_a_sweep_that_ends_shows_scores_and_one_with_failures_says_so(words, failing, capsys, monkeypatch):
    monkeypatch.setattr(sweep_command, "_executor", lambda settings, how: (InProcess(), list(settings)))
    assert sweep_and_show(None, words, SweepOptions(), False) == 0
    out = capsys.readouterr().out
    assert "written to" in out
    assert sum(line.lstrip().startswith("toy ") for line in out.splitlines()) == 5
    assert sweep_and_show(None, words, SweepOptions(), True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["done"] * 5
    assert rows[0]["summary"]["mean"]["samples"] == 4
    how = SweepOptions(debug=True)
    assert sweep_and_show(None, words | {"policies": f"{failing}:Bursts", "budgets": "16"}, how, False) == 1
    captured = capsys.readouterr()
    assert "failed: bursts at 16 on toy: Bursts.score failed: RuntimeError: the score is gone" in captured.err
    assert "Traceback" in captured.err
    assert "1 of 2 cells failed. To try them again: evictbench" in captured.err

    def stop(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_command, "_executor", lambda settings, how: (InProcess(stop), list(settings)))
    assert sweep_and_show(None, words | {"limit": 3}, SweepOptions(), False) == 130
    assert "Stopped; 20 finished samples are kept. To go on: evictbench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "how", "sentence"),
    [
        ({}, SweepOptions(executor="slurm"), "Unknown executor 'slurm'"),
        ({}, SweepOptions(shards=0), "--shards is 0"),
        ({}, SweepOptions(gpus_per_cell=-1), "--gpus-per-cell is -1"),
        ({}, SweepOptions(gpus_per_cell=0.5), "a worker has one GPU or several, whole"),
        ({}, SweepOptions(gpus_per_cell=2), "--gpus-per-cell 2 needs GPUs, and the device is cpu"),
        ({}, SweepOptions(executor="ray"), "leave out --device"),
        ({"device": "cpu,mps"}, SweepOptions(), "needs an Apple GPU|each has to be a GPU"),
        ({"model": "nowhere/at/all"}, SweepOptions(), "There is no folder nowhere/at/all"),
        ({"budgets": "-4"}, SweepOptions(), "is negative"),
        ({"limit": 0}, SweepOptions(), "--limit is 0"),
    ],
)
def test_bad_input_is_a_sentence(words, more, how, sentence):
    with pytest.raises(UserError, match=sentence):
        sweep_and_show(None, words | more, how, False)


def test_without_ray_a_sentence_says_how_to_get_it(words, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else found(name, *more))
    with pytest.raises(UserError, match=r"needs Ray, which is not installed: pip install 'evictbench\[ray\]'"):
        sweep_and_show(None, words | {"device": "auto"}, SweepOptions(executor="ray"), False)


def test_gpus_are_dealt_to_workers(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shown = [place.environment["CUDA_VISIBLE_DEVICES"] for place in worker_devices("auto")]
    assert shown == [str(index) for index in range(8)]
    shown = [place.environment["CUDA_VISIBLE_DEVICES"] for place in worker_devices("auto", 3)]
    assert shown == ["0,1,2", "3,4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h")
    shown = [place.environment["CUDA_VISIBLE_DEVICES"] for place in worker_devices("cuda:0,cuda:2")]
    assert shown == ["GPU-a", "GPU-c"]
    assert [place.device for place in worker_devices("balanced", 4)] == ["balanced"]
    for device, gpus, sentence in (
        ("cuda:0,cuda:0", 1, "names a GPU twice"),
        ("cuda:1,cuda:2", 3, "more than there are"),
        ("cuda:0,cpu", 1, "each has to be a GPU"),
        ("cuda:9", 1, "There is no cuda:9"),
    ):
        with pytest.raises(UserError, match=sentence):
            worker_devices(device, gpus)


def test_a_budget_that_is_no_bound_has_what_was_seen_beside_it(cells):
    def ended(policy, bound):
        mean = {"score": 0.5, "interval": None, "occupancy_mean": 7.25, "occupancy_max": 30, "cache_bytes": 8.0}
        theirs = cells[0].plan
        plan = SimpleNamespace(
            policy=SimpleNamespace(enforces_budget=bound), checked=theirs.checked, settings=theirs.settings
        )
        named = {"policy": policy, "suite": "toy", "budget": "16", "plan": plan, "state": "done", "done": 2, "total": 2}
        return SimpleNamespace(**named, summary={"mean": mean})

    text = text_of(result_table([ended("soft", False), ended("hard", True)]))
    assert re.search(r"soft +16 \(saw 7.2, a head at most 30\) ", text)
    assert re.search(r"hard +16 +50.0 ", text)


def test_trainings_end_with_a_row_of_mean_and_deviation(cells):
    """Scores of .2 and .6: their deviation with n - 1 is .28, and two trainings say next to nothing of their mean."""
    _, first, *rest = cells
    second = copy.copy(first)
    for cell, weights, score in ((first, "a", 0.2), (second, "b", 0.6)):
        cell.plan = dataclasses.replace(cell.plan, settings=dataclasses.replace(cell.plan.settings, weights=weights))
        cell.summary = {
            "mean": {"score": score, "interval": None, "occupancy_mean": 16.0, "occupancy_max": 16, "cache_bytes": 2000}
        }
        cell.state = "done"
    table = text_of(result_table([first, second, *rest]))
    (line,) = [line for line in table.splitlines() if "±" in line]
    assert "40.0 ± 28.3" in line
    assert "0.0-100.0" in line
    assert "2 trainings" in line
    mine = [line.split() for line in table.splitlines() if line.split()[1:3] == [first.policy, first.budget]]
    assert [words[-1] for words in mine] == ["a", "b", "units"]
    assert first.title.endswith("on toy, weights a")
    assert "±" not in text_of(result_table(cells[2:]))
