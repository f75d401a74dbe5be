"""A sweep from plans to results, its jobs done in this process."""

import json
import re
import shutil

import pytest
from executor_in_process import InProcess, Watcher

from evictbench.errors import UserError
from evictbench.evaluation import run
from evictbench.evaluation.settings import RunSettings
from evictbench.store import run_folder
from evictbench.store.frame import read_results
from evictbench.sweep.estimate import estimate
from evictbench.sweep.grid import grid_cells, parse_grid
from evictbench.sweep.plan import FAILURE, plan_cells, sweep
from evictbench.sweep.shards import merge_shards, shard_folder, shard_folders


@pytest.fixture
def grid(model, tmp_path):
    def grid(policies="h2o,tova", budgets="16,32", **words):
        words = {"suites": "toy", "model": model, "out": tmp_path / "runs", "device": "cpu", **words}
        return grid_cells(parse_grid({"policies": policies, "budgets": budgets, **words}))

    return grid


def lines_of(cell):
    """Every line of a cell's file, doubles included, by sample."""
    lines = [json.loads(line) for line in (cell.plan.folder / run_folder.SAMPLES).read_text().splitlines()]
    return sorted(run_folder.key_of(line) for line in lines), {run_folder.key_of(line): line for line in lines}


def test_every_cell_is_what_a_run_of_it_is_and_the_model_is_loaded_once(grid, tmp_path, monkeypatch):
    loads = []
    load_model = run.load_model
    monkeypatch.setattr(run, "load_model", lambda plan: loads.append(plan) or load_model(plan))
    cells, impossible = plan_cells(grid())
    assert not impossible
    assert len({id(cell.plan.tokenizer) for cell in cells}) == 1
    assert cells[0].plan.prompts[3].prompt is cells[4].plan.prompts[3].prompt
    watch = Watcher()
    progress = sweep(cells, InProcess(), watch)
    assert [cell.state for cell in cells] == ["done"] * 5
    assert watch.titles == [
        "full on toy",
        "h2o at 32 on toy",
        "tova at 32 on toy",
        "h2o at 16 on toy",
        "tova at 16 on toy",
    ]
    assert watch.shown
    assert len(loads) == 1
    assert progress.whole_left() == 0

    class Silent(Watcher):
        phase = planned = start = sample = lambda *_: None

    alone = run.run(
        RunSettings(
            policy="tova", suite="toy", budget="16", model=cells[0].plan.settings.model, out=tmp_path / "alone"
        ),
        Silent(),
    )
    theirs = run_folder.read_samples(alone.plan.folder)
    keys, ours = lines_of(cells[4])
    assert keys == sorted(theirs)
    same = ("text", "tokens", "score", "prompt_hash", "occupancy_max", "cache_bytes")
    assert all(ours[key][name] == theirs[key][name] for key in keys for name in same)
    assert alone.plan.folder.name == cells[4].plan.folder.name
    assert cells[4].summary["mean"]["score"] == pytest.approx(alone.summary["mean"]["score"])


def test_what_is_finished_is_not_run_again_and_a_larger_limit_extends(grid):
    sweep(plan_cells(grid(limit=2))[0], InProcess(), Watcher())
    again = InProcess()
    cells = plan_cells(grid(limit=2))[0]
    watch = Watcher()
    sweep(cells, again, watch)
    assert again.jobs == []
    assert [cell.state for cell in cells] == ["done"] * 5
    assert len(watch.titles) == 5
    assert all(cell.summary["mean"]["samples"] == 4 for cell in cells)
    before = (cells[0].plan.folder / run_folder.SAMPLES).read_text()
    more = plan_cells(grid(limit=3))[0]
    assert [cell.total - cell.done for cell in more] == [2] * 5
    sweep(more, InProcess(), Watcher())
    assert (more[0].plan.folder / run_folder.SAMPLES).read_text().startswith(before)
    assert more[0].made == 2


def test_cells_that_cannot_be_are_named_and_a_sweep_that_cannot_be_is_refused(grid):
    cells, impossible = plan_cells(grid("streaming_llm,h2o", "2,32"))
    assert [cell.title for cell in cells] == [
        "full on toy",
        "streaming_llm at 32 on toy",
        "h2o at 32 on toy",
        "h2o at 2 on toy",
    ]
    assert [one.title for one in impossible] == ["streaming_llm at 2 on toy"]
    assert "needs a budget of at least" in impossible[0].sentence
    with pytest.raises(UserError, match="A context of 9000 tokens is longer than the window"):
        plan_cells(grid(context=9000))
    with pytest.raises(UserError, match="Unknown task"):
        plan_cells(grid(tasks="toy_nothing"))


def test_a_failed_cell_does_not_stop_the_others_and_says_why(grid, failing):
    policies = f"{failing}:Bursts,h2o,{failing}:Hungry"
    cells, _ = plan_cells(grid(policies, "32", limit=1))
    watch = Watcher()
    sweep(cells, InProcess(), watch)
    assert [cell.state for cell in cells] == ["done", "failed", "done", "failed"]
    bursts, hungry = cells[1], cells[3]
    assert bursts.sentence == "Bursts.score failed: RuntimeError: the score is gone."
    assert "in score" in bursts.trace
    assert hungry.sentence == "Out of memory with a single row: no room for 3 GiB"
    for cell in (bursts, hungry):
        text = (cell.plan.folder / FAILURE).read_text()
        assert text.startswith(cell.sentence)
        assert "Traceback" in text
        assert not (cell.plan.folder / ".phase").exists()
    again = InProcess()
    sweep(plan_cells(grid(policies, "32", limit=1))[0], again, Watcher())
    assert [job.title for job in again.jobs] == ["bursts at 32 on toy", "hungry at 32 on toy"]


def test_the_note_of_a_failure_goes_when_the_cell_is_done(grid):
    cells, _ = plan_cells(grid("h2o", "32", limit=1))
    cells[1].plan.folder.mkdir(parents=True)
    (cells[1].plan.folder / FAILURE).write_text("before")
    sweep(cells, InProcess(), Watcher())
    assert cells[1].state == "done"
    assert not (cells[1].plan.folder / FAILURE).exists()


def test_shards_deal_out_documents_and_are_merged_exactly_once(grid):
    cells, _ = plan_cells(grid("h2o", "32", limit=7, temperature=0.7, repeats=2))
    here = InProcess()
    seen = []

    def look(job):
        seen.append(job.title)
        if job.cell == 1 and job.shard == 2:
            assert len(shard_folders(job.cell_folder)) == 3
            frame = read_results(job.cell_folder.parent)
            assert set(frame["folder"]) == {str(cells[0].plan.folder)}

    here.before = look
    sweep(cells, here, Watcher(), shards=3)
    assert seen[:3] == ["full on toy, shard 1 of 3", "full on toy, shard 2 of 3", "full on toy, shard 3 of 3"]
    for cell in cells:
        keys, lines = lines_of(cell)
        assert keys == sorted(cell.keys)
        assert len(keys) == 28
        assert shard_folders(cell.plan.folder) == []
        sessions = run_folder.read_run(cell.plan.folder)["sessions"]
        assert len(sessions) == 3
        assert {line["session"] for line in lines.values()} == {0, 1, 2}
        dealt = {(line["session"], key[1] % 3) for key, line in lines.items()}
        assert len(dealt) == 3
        assert cell.summary["mean"]["samples"] == 28


def test_merging_may_be_stopped_and_done_again(grid, tmp_path):
    """Killed between adding and removing, a shard is there once more; then with another number of shards."""
    kept = tmp_path / "kept"

    def keep(job):
        if job.cell == 1 and job.shard == 1:
            shutil.copytree(shard_folder(job.cell_folder, 0, 2), kept)

    cells, _ = plan_cells(grid("h2o", "32", limit=4))
    sweep(cells, InProcess(keep), Watcher(), shards=2)
    cell = cells[1]
    before, _ = lines_of(cell)
    back = shard_folder(cell.plan.folder, 0, 2)
    shutil.copytree(kept, back)
    assert merge_shards(cell.plan.folder, cell.plan.fingerprint) == 0
    assert lines_of(cell)[0] == before
    assert not back.exists()

    samples = cell.plan.folder / run_folder.SAMPLES
    samples.unlink()
    shutil.copytree(kept, back)
    with (back / run_folder.SAMPLES).open("a") as file:
        file.write('{"task": "toy_recall", "doc_')  # torn
    cells, _ = plan_cells(grid("h2o", "32", limit=4))
    assert cells[1].done == 4
    assert back.exists()  # planning alone changes nothing
    here = InProcess()
    sweep(cells, here, Watcher(), shards=3)
    assert [job.title for job in here.jobs] == ["h2o at 32 on toy, shard 1 of 3", "h2o at 32 on toy, shard 2 of 3"]
    assert lines_of(cells[1])[0] == before


def test_a_cell_that_another_process_writes_to_is_left_to_it(grid):
    cells, _ = plan_cells(grid("h2o", "32", limit=1))
    with run_folder.open_run(cells[0].plan.folder, cells[0].plan.fingerprint):
        sweep(cells, InProcess(), Watcher())
    assert [cell.state for cell in cells] == ["failed", "done"]
    assert cells[0].sentence.startswith("Another run is writing to")


def test_ctrl_c_keeps_what_is_finished_and_goes_through(grid):
    def stop(job):
        if job.cell == 2:
            raise KeyboardInterrupt

    cells, _ = plan_cells(grid(limit=1))
    with pytest.raises(KeyboardInterrupt):
        sweep(cells, InProcess(stop), Watcher())
    assert [cell.state for cell in cells] == ["done", "done", "stopped", "stopped", "stopped"]
    assert not cells[4].plan.folder.exists()  # never begun
    assert not (cells[2].plan.folder / FAILURE).exists()
    cells, _ = plan_cells(grid(limit=1))
    sweep(cells, InProcess(), Watcher())
    assert [cell.state for cell in cells] == ["done"] * 5


def test_estimates_count_what_is_missing(grid):
    cells, _ = plan_cells(grid("h2o", "16", limit=3, batch_size=2))
    full, h2o = estimate(cells, cells[0].plan.settings.out)
    prompts = cells[0].plan.prompts
    assert full.samples == 6
    assert full.prompt_tokens == sum(len(planned.prompt.ids) for planned in prompts)
    assert full.answer_tokens == sum(planned.max_new_tokens for planned in prompts)
    token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, KV heads, head_dim, float32
    longest = max(len(planned.prompt.ids) for planned in prompts)
    assert h2o.cache_bytes == 2 * 16 * token
    assert h2o.prompt_bytes == full.prompt_bytes == longest * token
    assert full.cache_bytes == 2 * token * max(len(planned.prompt.ids) + planned.max_new_tokens for planned in prompts)
    assert full.seconds == full.prompt_tokens / 1000 + full.answer_tokens / 20
    assert "assumed" in full.timed_by

    sweep(cells, InProcess(), Watcher())
    cells, _ = plan_cells(grid("h2o,tova", "16", limit=6, batch_size=2))
    full, h2o, tova = estimate(cells, cells[0].plan.settings.out)
    assert (full.samples, h2o.samples, tova.samples) == (6, 6, 12)
    assert (full.timed_by, h2o.timed_by, tova.timed_by) == (
        "its own samples",
        "its own samples",
        "the model's other samples",
    )
    lines = run_folder.read_samples(cells[1].plan.folder).values()
    measured = sum(line["cache_bytes"] for line in lines) / len(lines)
    assert measured / 16 == pytest.approx(token, rel=0.15)  # H2O's masses are held besides
    row = cells[0].finished and run_folder.read_samples(cells[0].plan.folder)
    took = sum(line["prefill_seconds"] + line["decode_seconds"] for line in row.values())
    assert full.seconds == pytest.approx(took, rel=0.3)  # as many samples again, of about the same lengths


def test_a_damaged_folder_is_named_and_the_other_cells_go_on(grid):
    def damage(job):
        if job.cell == 2:
            (job.cell_folder / run_folder.RUN).write_text("{")

    cells, _ = plan_cells(grid("h2o", "32,16", limit=1))
    sweep(cells[:2], InProcess(), Watcher())
    file = cells[1].plan.folder / run_folder.SAMPLES
    whole = file.read_text()
    file.write_text(whole.replace('"score": ', '"score": null, "was": ', 1))
    cells, _ = plan_cells(grid("h2o", "32,16", limit=1))
    watch, here = Watcher(), InProcess(damage)
    sweep(cells, here, watch)
    assert [cell.state for cell in cells] == ["done", "failed", "failed"]
    assert re.search(r"^Line 1 of .*samples\.jsonl is damaged", cells[1].sentence)
    assert re.search(r"run\.json is damaged", cells[2].sentence)
    assert sorted(watch.titles) == sorted(cell.title for cell in cells)
    assert [job.title for job in here.jobs] == ["h2o at 16 on toy"]
    file.write_text(whole)
    cells, _ = plan_cells(grid("h2o", "32", limit=1))
    sweep(cells, InProcess(), Watcher())
    assert [cell.state for cell in cells] == ["done"] * 2
    assert not (cells[1].plan.folder / FAILURE).exists()


def test_a_merge_that_is_killed_is_gone_on_with(grid, tmp_path, monkeypatch):
    def keep(job):
        if job.shard == 1:
            shutil.copytree(shard_folder(job.cell_folder, 0, 2), tmp_path / "kept")

    def half(folder, *options, **more):
        (folder / run_folder.RUN).unlink()
        raise KeyboardInterrupt

    cells, _ = plan_cells(grid("h2o", "32", limit=4))
    sweep(cells[1:], InProcess(keep), Watcher(), shards=2)
    folder, fingerprint = cells[1].plan.folder, cells[1].plan.fingerprint
    before, _ = lines_of(cells[1])
    shard = shard_folder(folder, 0, 2)
    for kill in ("while the shard was removed", "as an earlier version did", "before all samples were added"):
        shutil.copytree(tmp_path / "kept", shard)
        if kill == "while the shard was removed":
            with monkeypatch.context() as patch:
                patch.setattr(shutil, "rmtree", half)
                with pytest.raises(KeyboardInterrupt):
                    merge_shards(folder, fingerprint)
            assert shard_folders(folder) == []
        elif kill == "as an earlier version did":
            (shard / run_folder.RUN).unlink()
        else:
            samples = folder / run_folder.SAMPLES
            samples.write_bytes(b"".join(samples.read_bytes().splitlines(keepends=True)[1:]))
        assert merge_shards(folder, fingerprint) == (kill == "before all samples were added")
        assert lines_of(cells[1])[0] == before
        assert not (folder / ".shards").exists()
    shutil.copytree(tmp_path / "kept", shard)
    (shard / run_folder.RUN).unlink()
    (folder / run_folder.SAMPLES).unlink()
    with pytest.raises(UserError, match=r"holds samples but no run\.json"):
        merge_shards(folder, fingerprint)
    assert shard.exists()
