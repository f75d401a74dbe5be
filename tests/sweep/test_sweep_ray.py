"""Shards of cells as tasks of a real Ray cluster on this machine, with two workers."""

import json
import os
import signal
import threading
import time
from collections import Counter

import pytest
from executor_in_process import Watcher
from fake_plugin_fixtures import SITE

from evictbench.evaluation.settings import RunSettings
from evictbench.store import run_folder
from evictbench.sweep.plan import _jobs, plan_cells, sweep
from evictbench.sweep.ray import RayTasks
from evictbench.sweep.shards import shard_folders


def start_node(tries=4):
    """Ray gives its own processes half a minute to come up, which a busy machine may not keep."""
    from ray.cluster_utils import Cluster

    for left in reversed(range(tries)):
        try:
            return Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
    return None


@pytest.fixture(scope="module")
def cluster():
    """A node with two workers of one CPU each, found by its address, as any cluster is."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # it would write a token into the home folder
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'evictbench[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        # Workers are no children of the tests: they find the fake suite by this.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), str(SITE / "installed")]))
        node = start_node()
        patch.setenv("RAY_ADDRESS", node.address)
        yield
        node.shutdown()


def kill_one(root, killed, over):
    """Kill the first worker that is in the middle of a shard of h2o's cell, where a sample is finished."""
    while not over.is_set():
        for file in root.glob("toy/tiny/h2o-*/.shards/*/.phase"):
            try:
                phase = json.loads(file.read_text())
            except (OSError, ValueError):
                continue
            samples = file.parent / run_folder.SAMPLES
            if phase["phase"] == "answering" and samples.exists() and samples.stat().st_size:
                os.kill(phase["pid"], signal.SIGKILL)
                killed.append(file.parent.name)
                return
        time.sleep(0.002)


def test_a_worker_killed_in_the_middle_is_replaced_and_every_sample_is_there_once(cluster, model, tmp_path):
    root = tmp_path / "runs"
    common = {"suite": "toy", "model": model, "out": root, "limit": 20, "batch_size": 1}
    cells, _ = plan_cells([RunSettings("full", **common), RunSettings("h2o", budget="16", **common)])
    killed, over = [], threading.Event()
    killer = threading.Thread(target=kill_one, args=(root, killed, over), daemon=True)
    killer.start()
    sweep(cells, RayTasks(None), Watcher(), shards=2)
    over.set()
    killer.join()
    assert [(cell.state, cell.sentence) for cell in cells] == [("done", "")] * 2
    assert len(killed) == 1
    for cell in cells:
        lines = [json.loads(line) for line in (cell.plan.folder / run_folder.SAMPLES).read_text().splitlines()]
        keys = Counter(map(run_folder.key_of, lines))
        assert keys.keys() == cell.keys
        assert set(keys.values()) == {1}
        assert shard_folders(cell.plan.folder) == []
    sessions = Counter(line["session"] for line in lines)
    assert len(sessions) == 3  # the shard that was not hurt, and both halves of the one that was
    assert cells[1].summary["mean"]["samples"] == 40

    # Closing in the middle of another cell stops its task in good order.
    slow = RunSettings("tova", budget="16", **common | {"limit": 1500, "max_new_tokens": "32"})
    (cell,), _ = plan_cells([slow])
    events = RayTasks(None).run(_jobs([cell], 1))
    for _ in events:
        cell.read()
        if cell.done:
            break
    events.close()
    deadline = time.monotonic() + 600
    summary, phase = cell.plan.folder / run_folder.SUMMARY, cell.plan.folder / ".phase"
    while (phase.exists() or not summary.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    with run_folder.open_run(cell.plan.folder, cell.plan.fingerprint) as folder:
        assert 0 < len(folder.samples) < 3000
    assert not phase.exists()
