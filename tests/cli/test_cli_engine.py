"""`evictbench run` on the real engine: a tiny model killed and started again, and the bundled model end to end."""

import json
import random
import subprocess
import sys
import time

import pytest
from fake_plugins import make_model

import evictbench
from evictbench.cli import app
from evictbench.store import run_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers, random float32 weights, larger than usual so that what is kept decides what comes next."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", initializer_range=0.4)


@pytest.fixture
def main(monkeypatch, tmp_path, capsys):
    def call(line):
        words = line.split()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["evictbench", *words])
        with pytest.raises(SystemExit) as ended:
            app.main(words)
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        return out

    return call


def essence(folder):
    return {
        key: (line["prompt_hash"], line["tokens"], line["score"], line["text"])
        for key, line in run_folder.read_samples(folder).items()
    }


def test_a_killed_run_ends_as_an_unbroken_one(main, model, tmp_path, environment):
    """One row, float32: same ids, same tokens, same scores."""
    line = f"run --suite toy --policy h2o --budget 40 --limit 40 --batch-size 1 --dtype float32 --model {model}"
    main(f"{line} --out whole")
    (whole,) = (tmp_path / "whole").glob("toy/tiny/*")
    process = subprocess.Popen(
        [sys.executable, "-m", "evictbench", *line.split(), "--out", "broken"],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    wanted = random.randrange(1, 30)
    deadline = time.monotonic() + 600
    while True:
        files = list((tmp_path / "broken").glob("toy/tiny/*/samples.jsonl"))
        if files and files[0].read_bytes().count(b"\n") >= wanted:
            break
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.wait()
    (broken,) = (tmp_path / "broken").glob("toy/tiny/*")
    assert broken.name == whole.name
    before = len(essence(broken))
    assert wanted <= before <= 80
    main(f"{line} --out broken")
    assert essence(broken) == essence(whole)
    assert (
        len({tuple(tokens) for _, tokens, _, _ in essence(whole).values()}) > 40
    )  # answers differ, so equality says something


@pytest.mark.parametrize(
    "policy", ["streaming_llm", "tova", "h2o", "snapkv:window=8,decode=reselect", "random:recent=8"]
)
@pytest.mark.parametrize("prefill", ["native", "dense", "bounded"])
def test_a14_occupancy_stays_within_the_budget_for_every_policy(main, model, tmp_path, policy, prefill):
    line = f"run --suite toy --policy {policy} --limit 3 --batch-size 2 --chunk 16 --model {model} --prefill {prefill}"
    main(f"{line} --budget 40")
    main(f"{line} --budget 50%")
    frame = evictbench.results(tmp_path / "results" / "runs")
    assert len(frame) == 12
    decoded = frame[frame["decode_steps"] > 0]
    absolute, share = (decoded[decoded["budget"] == budget] for budget in ("40", "50%"))
    assert absolute["occupancy_max"].max() <= 40
    assert absolute["occupancy_mean"].min() > 20
    allowed = (share["prompt_tokens"] + share["output_tokens"]) // 2
    assert (share["occupancy_max"] <= allowed.clip(lower=32)).all()
    assert (frame["prefill_peak_bytes"] > 0).all()


def test_b3_the_kept_set_depends_on_the_question_only_where_it_is_seen(main, model, tmp_path):
    """Same sample, same prompt ids, both protocols: other answers, and each result names its protocol."""
    line = f"run --suite toy --policy snapkv:window=8 --budget 24 --limit 8 --model {model}"
    main(f"{line} --question unseen")
    main(f"{line} --question seen")
    frame = evictbench.results(tmp_path / "results" / "runs")
    frame = frame.set_index(["task", "doc_id"]).sort_index()
    unseen, seen = (frame[frame["question"] == name] for name in ("unseen", "seen"))
    assert len(unseen) == len(seen) == 16
    assert (unseen["prompt_hash"] == seen["prompt_hash"]).all()
    assert unseen["border"].notna().all()
    assert seen["border"].isna().all()
    assert (unseen["text"] != seen["text"]).any()


def test_the_bundled_model_answers_ruler_end_to_end(main, tmp_path):
    """niah_single_1 at 1,024 tokens under the full cache: at least 90% right."""
    pytest.importorskip("wonderwords")
    out = main("run --policy full --suite ruler --tasks niah_single_1 --context 1024 --limit 5 --json")
    summary = json.loads(out)
    row = summary["tasks"]["niah_single_1"]
    assert row["samples"] == 5
    assert row["score"] >= 0.9
    assert row["occupancy_max"] > 800
    assert row["truncated"] == 0
    # 30 layers, 3 KV heads of 64, keys and values, float32: every token of the prompt and of the answer.
    assert row["cache_bytes"] >= 30 * 3 * 64 * 2 * 4 * row["prompt_tokens"]
