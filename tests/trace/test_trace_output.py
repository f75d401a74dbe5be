"""The output of a trace: its defaults, its progress, its folder; and with --quiet and --json."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from evictbench.cli.trace import TraceLines, cell_table
from evictbench.trace.settings import TraceCell

COMMAND = ("trace", "--policies", "h2o", "--budget", "24,48", "--contexts", "64", "--new-tokens", 8, "--out", "t")
TINY_MODEL = ("--model", "shape:tiny", "--device", "cpu")


def test_it_says_its_defaults_and_what_comes_next(main: Any) -> None:
    code, out, err = main(*COMMAND, *TINY_MODEL)
    assert code == 0, err
    for line in (
        "trace:",
        "  model     shape:tiny, float32, device cpu",
        "  policies  full; h2o (group=mean, shares=head)",
        "  budget    24, 48 entries per KV head",
        "  contexts  64 tokens, 8 new ones",
        "  rows      1",
        "  text      tokens drawn from the seed, seed 0",
        "  prefill   native, chunks of 512 tokens",
        "  kept      positions not noted",
        "  folder    t",
        "  cells     3",
        "written to t",
        "next: evictbench plot t",
    ):
        assert line in out.splitlines(), line
    assert "measuring 1/3 full, context 64, 1 row ...\n1/3 full, context 64, 1 row: first token after" in err
    code, out, _ = main(*COMMAND, *TINY_MODEL)
    assert "  cells     3, 3 there from before" in out.splitlines()


def test_quiet_leaves_the_table_and_json_stands_alone(main: Any, tmp_path: Path) -> None:
    code, out, err = main(*COMMAND, *TINY_MODEL, "--quiet")
    assert (code, err) == (0, "")
    assert "trace:" not in out
    assert "written to" not in out
    assert "h2o" in out
    code, out, err = main(*COMMAND, *TINY_MODEL, "--json")
    assert code == 0
    assert [cell["policy"] for cell in json.loads(out)["cells"]] == ["full", "h2o", "h2o"]
    assert "written to t" in err
    assert main(*COMMAND, *TINY_MODEL, "--json", "--quiet") == (0, out, "")


def test_on_a_terminal_the_line_of_a_cell_under_way_goes_when_it_ends() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40)
    found = {"status": "ok", "first_token_seconds": 0.5, "decode_ms": 2.0}
    with TraceLines(console) as lines:
        lines.timed("measuring 1/1 a policy of a long name, context 64, 1 row")
        assert lines.live is None
        lines.cell_done(1, 1, TraceCell("h2o", "24", 64, 1), found)
        lines.timed("measuring")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\r\r\x1b[2K1/1 h2o 24, context 64, 1 row: first token after 0.5 s, 2 ms a step\n" in text
    assert text.splitlines()[0].startswith("measuring 1/1 a policy")
    assert text.endswith("\r\x1b[2K")


def test_a_budget_that_is_no_bound_has_what_was_held_beside_it() -> None:
    numbers = {"read_bytes_per_second": 1e9, "copy_bandwidth": 2e9, "decode_ms": 4.0, "first_token_seconds": 0.1}
    sizes = {"decode_cache_bytes": 1e6, "decode_peak_bytes": 1e6, "context": 64, "rows": 1, "status": "ok"}
    cells = [
        {"cell": number, "policy": policy, "budget": "32", **numbers, **sizes}
        for number, policy in enumerate(("dms", "h2o"))
    ]
    step = {"phase": "decode", "status": "ok", "entries_mean": 20.5, "entries_max": 41}
    times = dict.fromkeys(("ms", "attention_ms", "signals_ms", "policy_ms", "rest_ms"), 1.0)
    steps = pd.DataFrame([{"cell": number, **step, **times} for number in (0, 1)])
    console = Console(file=io.StringIO(), width=200)
    console.print(cell_table({"model": "m", "device": "cpu", "cells": cells}, steps))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("  ")[0].strip() for line in lines if "32" in line][:2] == ["dms", "h2o"]
    assert "32 (saw 20.5, a head at most 41)" in next(line for line in lines if "dms" in line)
    assert "saw" not in next(line for line in lines if "h2o" in line)
