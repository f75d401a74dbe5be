"""Traces of a tiny model: columns, bytes, times, memory that runs out, interruptions, retention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from evictbench.generation.runner import ModelRunner
from evictbench.models import random_models
from evictbench.models.machine import MemoryUsage
from evictbench.plot import trace
from evictbench.store.trace_files import (
    RETENTION_FILE,
    STEPS,
    STEPS_FILE,
    TRACE,
    read_retention,
    read_trace,
    write_table,
)
from evictbench.trace.cell import CellRunner

BUDGET = 48
COMMON = ("--model", "shape:tiny", "--chunk", 64, "--new-tokens", 24, "--out", "t")


def cells(about: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(cell["policy"], cell["budget"], cell["context"], cell["rows"]) for cell in about["cells"]]


def rows_of(steps: pd.DataFrame, policy: str, phase: str) -> pd.DataFrame:
    return steps[(steps["policy"] == policy) & (steps["phase"] == phase)]


def test_the_full_cache_grows_and_the_others_stay_as_they_are(main: Any, tmp_path: Path) -> None:
    code, out, err = main(
        "trace", "--policies", "h2o,streaming_llm", "--budget", BUDGET, "--contexts", 200, *COMMON, "--new-tokens", 80
    )
    assert code == 0, err
    assert "next: evictbench plot t" in out
    about, steps = read_trace(tmp_path / "t")
    assert cells(about) == [("full", None, 200, 1), ("h2o", "48", 200, 1), ("streaming_llm", "48", 200, 1)]
    assert list(steps) == [column.name for column in STEPS]
    assert set(steps["status"]) == {"ok"}
    for policy in ("full", "h2o", "streaming_llm"):
        prompt, decode = rows_of(steps, policy, "prefill"), rows_of(steps, policy, "decode")
        assert prompt["position"].tolist() == [64, 128, 192, 200]
        assert decode["position"].tolist() == list(range(201, 281))
        assert prompt["step"].tolist() == [0, 1, 2, 3]
    full, h2o = rows_of(steps, "full", "decode"), rows_of(steps, "h2o", "decode")
    assert full["entries_max"].tolist() == full["position"].tolist()
    assert full["cache_bytes"].is_monotonic_increasing
    assert full["cache_bytes"].nunique() > 1
    keys_and_values = 2 * 2 * 2 * 16 * 4
    assert full["cache_bytes"].iloc[-1] >= 280 * keys_and_values
    assert h2o["cache_bytes"].nunique() == 1
    assert h2o["cache_bytes"].iloc[0] < 2 * BUDGET * keys_and_values
    assert set(h2o["entries_max"]) == {BUDGET - 1}
    assert (steps["allocated_bytes"] > 2**20).all()
    assert about["cells"][0]["decode_cache_bytes"] == full["cache_bytes"].max()
    assert about["copy_bandwidth"] > 0
    assert about["cells"][1]["decode_peak_bytes"] >= h2o["allocated_bytes"].max()
    plots = trace.memory_points(steps)
    assert plots[(plots["policy"] == "h2o") & (plots["panel"] == "cache held")]["value"].nunique() == 1


def test_parts_make_up_the_step_and_steps_the_phase(main: Any, tmp_path: Path) -> None:
    """Another process may take the processor between two steps, so that the best of some traces counts."""
    best: dict[tuple[str, str], float] = {}
    for attempt in range(4):
        arguments = ("--policies", "snapkv", "--budget", "96", "--contexts", 512, "--batch-size", 4)
        code, _, err = main("trace", *arguments, *COMMON, "--out", f"t{attempt}")
        assert code == 0, err
        about, steps = read_trace(tmp_path / f"t{attempt}")
        parts = steps[["attention_ms", "signals_ms", "policy_ms", "rest_ms"]]
        np.testing.assert_allclose(parts.sum(axis=1), steps["ms"])
        assert (parts[["attention_ms", "policy_ms", "rest_ms"]] > 0).all(axis=None)
        assert (rows_of(steps, "snapkv", "prefill")["signals_ms"] > 0).all()
        assert (rows_of(steps, "full", "decode")["signals_ms"] == 0).all()
        for cell in about["cells"]:
            for phase in ("prefill", "decode"):
                share = rows_of(steps, cell["policy"], phase)["ms"].sum() / 1000 / cell[f"{phase}_seconds"]
                assert share <= 1
                best[cell["policy"], phase] = max(share, best.get((cell["policy"], phase), 0))
            assert cell["wall_seconds"] > cell["prefill_seconds"] + cell["decode_seconds"]
        if min(best.values()) > 0.95:
            break
    assert min(best.values()) > 0.95, best


def failing(monkeypatch: pytest.MonkeyPatch, when: Any, error: BaseException) -> None:
    """Make a forward pass fail where `when` says so of the cache."""
    plain = ModelRunner.forward

    def forward(self: ModelRunner, cache: Any, *arguments: Any, **named: Any) -> Any:
        if when(cache):
            raise error
        return plain(self, cache, *arguments, **named)

    monkeypatch.setattr(ModelRunner, "forward", forward)


def test_memory_that_runs_out_is_a_result(main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In decode after some steps, and in a prompt; the other cells run."""

    def when(cache: Any) -> bool:
        full = cache.policy.name == "full" and bool(cache.seen)
        return full and (cache.seen[0] >= 310 or (cache.row_capacity is not None and cache.seen[0] >= 205))

    failing(monkeypatch, when, torch.OutOfMemoryError("none left"))
    code, out, err = main("trace", "--policies", "tova", "--budget", BUDGET, "--contexts", "200,400", *COMMON)
    assert code == 0, err
    assert out.count("out of memory") == 2
    about, steps = read_trace(tmp_path / "t")
    assert [cell["status"] for cell in about["cells"]] == ["out of memory", "ok", "out of memory", "ok"]
    lost = steps[steps["status"] != "ok"]
    assert lost[["cell", "phase", "step", "position"]].to_numpy().tolist() == [
        [0, "decode", 5, 205],
        [2, "prefill", 5, 320],
    ]
    assert lost[["ms", "cache_bytes", "allocated_bytes"]].isna().all(axis=None)
    assert len(steps[(steps["cell"] == 0) & (steps["status"] == "ok")]) == 4 + 5
    assert len(steps[steps["cell"] == 2]) == 1
    points = trace.latency_points(steps)
    assert points["lost"].sum() == 2


def test_a_cache_larger_than_the_processor_s_memory_is_not_begun(
    main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(MemoryUsage, "available", lambda self: 3 * 200 * 2 * 2 * 2 * 16 * 4)
    arguments = ("--policies", "tova", "--budget", BUDGET, "--contexts", 200, "--batch-size", "1,4")
    code, _, err = main("trace", *arguments, *COMMON)
    assert code == 0, err
    about, steps = read_trace(tmp_path / "t")
    assert [cell["status"] for cell in about["cells"]] == ["ok", "ok", "out of memory", "ok"]
    assert set(steps[steps["cell"] == 2]["phase"]) == {"prefill", "decode"}


def test_finished_cells_stay_and_the_same_command_goes_on(
    main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ("--policies", "h2o,tova", "--budget", BUDGET, "--contexts", "100,200", "--retention", 32)
    with monkeypatch.context() as patched:
        failing(
            patched,
            lambda cache: cache.policy.name == "h2o" and [row.prompt for row in cache.rows] == [200],
            KeyboardInterrupt(),
        )
        code, _, err = main("trace", *arguments, *COMMON)
    assert code == 130
    assert "To go on: evictbench trace" in err
    about, before = read_trace(tmp_path / "t")
    assert len(about["cells"]) == 4
    # What a process leaves that is killed between two files.
    table = pq.read_table(tmp_path / "t" / STEPS_FILE)
    unnamed = before.tail(1).assign(cell=4)
    torn = pd.concat([before, unnamed])
    whole = type(table).from_pandas(torn, schema=table.schema, preserve_index=False)
    write_table(whole, tmp_path / "t" / STEPS_FILE)
    (tmp_path / "t" / f".{STEPS_FILE}-unfinished-abc").write_bytes(b"PAR1")
    code, _, err = main("trace", *arguments, *COMMON)
    assert code == 0, err
    assert err.count("first token after") == 2
    about, after = read_trace(tmp_path / "t")
    pd.testing.assert_frame_equal(after[after["cell"] < 4].reset_index(drop=True), before)
    assert [cell["cell"] for cell in about["cells"]] == list(range(6))
    assert after.groupby("cell").size().gt(1).all()
    assert not list((tmp_path / "t").glob("*unfinished*"))
    with monkeypatch.context() as patched:
        patched.setattr(random_models, "build", lambda *_: pytest.fail("nothing is left to load a model for"))
        assert main("trace", *arguments, *COMMON)[0] == 0
    code, _, err = main("trace", *arguments, *COMMON, "--contexts", "100,150")
    assert code == 0, err
    assert len(json.loads((tmp_path / "t" / TRACE).read_text())["cells"]) == 9
    code, _, err = main("trace", *arguments, *COMMON, "--chunk", 32)
    assert code == 2
    assert "was made with chunk 64, and this one has 32: name another folder with --out." in err


def test_retention_is_what_was_held(main: Any, tmp_path: Path) -> None:
    arguments = (
        "--policies",
        "streaming_llm,indexmem_pp",
        "--budget",
        BUDGET,
        "--contexts",
        "100,200",
        "--retention",
        50,
    )
    code, out, err = main("trace", *arguments, "--batch-size", "1,2", *COMMON, "--prefill", "bounded")
    assert code == 0, err
    assert "random weights, whose choices mean nothing: indexmem_pp" in out
    about, _ = read_trace(tmp_path / "t")
    assert about["policies"]["indexmem_pp"]["weights"] == "random"
    assert about["policies"]["streaming_llm"]["weights"] is None
    kept = read_retention(tmp_path / "t")
    assert kept is not None
    chosen = {
        (cell["policy"], cell["context"], cell["rows"]) for cell in about["cells"] if cell["cell"] in set(kept["cell"])
    }
    assert chosen == {("streaming_llm", 200, 1), ("indexmem_pp", 200, 1)}
    streaming = kept[kept["policy"] == "streaming_llm"]
    assert sorted(set(streaming["seen"])) == [64, 128, 192, 200, 224]
    for _, look in streaming.iterrows():
        held = look["positions"].tolist()
        assert held == [0, 1, 2, 3, *range(look["seen"] - (BUDGET - 1 - 4), look["seen"])]
    means = kept[kept["policy"] == "indexmem_pp"].groupby("seen")["positions"].apply(lambda held: held.map(len).mean())
    assert (means < BUDGET).all()
    assert not trace.retention_map(kept).empty


def test_nothing_is_kept_of_retention_where_it_is_not_asked_for(main: Any, tmp_path: Path) -> None:
    assert main("trace", "--policies", "full", "--contexts", 32, *COMMON)[0] == 0
    assert not (tmp_path / "t" / RETENTION_FILE).exists()


def test_a_text_is_read_and_gone_on_with(main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the bundled model, with bundled weights; the tokens fed are those of the text."""
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog, and then it rests. " * 20)
    fed: list[list[list[int]]] = []
    plain = ModelRunner.forward
    monkeypatch.setattr(CellRunner, "warm_up", lambda *_: None)

    def forward(self: ModelRunner, cache: Any, tokens: list[list[int]], starts: Any) -> Any:
        fed.append(tokens)
        return plain(self, cache, tokens, starts)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    arguments = ("--policies", "streaming_llm,dms", "--budget", "60%", "--contexts", 160, "--new-tokens", 4)
    code, _, err = main("trace", *arguments, "--text", "text.txt", "--dtype", "float32", "--chunk", 100, "--out", "t")
    assert code == 0, err
    from evictbench.models import load

    tokens = load.load_tokenizer(load.resolve("smollm2"))((tmp_path / "text.txt").read_text())["input_ids"]
    one = [tokens[:100], tokens[100:160], *([token] for token in tokens[160:164])]
    assert [rows[0] for rows in fed] == one * 3
    about, steps = read_trace(tmp_path / "t")
    assert about["policies"]["dms"]["weights"].startswith("bundled smollm2, sha256 ")
    dms, full = rows_of(steps, "dms", "decode"), rows_of(steps, "full", "decode")
    assert (dms["entries_mean"] < full["entries_mean"].to_numpy()).all()
    assert (dms["entries_max"] >= dms["entries_mean"]).all()
