"""What the oracle study writes from its lines."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from evictbench.evaluation.settings import RunSettings
from studies import compare
from studies.oracle_report import draw, report
from studies.oracle_study import Line, write

LINES = [
    Line("ruler", "vt", "full", "", "score", 2, 1.0, 0.34, 1.0),
    Line("ruler", "vt", "oracle:label=max", "128", "score", 2, 0.5, 0.09, 0.91),
    Line("ruler", "vt", "oracle:label=max", "64", "score", 1, 0.0, None, None),
    Line("fidelity", "gsm8k", "full", "", "kl", 2, 1.23456789e-7, 0.0, 2e-7),
    Line("fidelity", "gsm8k", "oracle:label=max", "128", "kl", 2, 0.0612, 0.05, 0.07),
    Line("fidelity", "gsm8k", "oracle:label=max", "64", "kl", 2, 0.12, 0.1, 0.14),
]


def test_the_data_file_reads_back(tmp_path: Path) -> None:
    write(LINES, tmp_path / "data.csv")
    with (tmp_path / "data.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["mean"]) for row in rows] == pytest.approx([line.mean for line in LINES], rel=1e-5)
    assert rows[2]["low"] == rows[2]["high"] == ""


def test_the_report_says_what_was_run_and_every_number() -> None:
    run = RunSettings(policy="full", suite="fidelity", tasks="gsm8k", context=864, limit=2, max_new_tokens="96")
    text = report(LINES, [run], "smollm2")
    assert "- fidelity: gsm8k; 864 tokens, 2 samples a task, seed 0, at most 96 tokens of continuation" in text
    assert "| `oracle:label=max` | 128 | 0.0612 (0.05 to 0.07) |" in text
    assert "| `oracle:label=max` | 64 | 0 |" in text


def test_the_plot_is_drawn_and_is_the_same_again(tmp_path: Path) -> None:
    draw(LINES, tmp_path)
    first = (tmp_path / "plot.svg").read_bytes()
    draw(LINES, tmp_path)
    assert (tmp_path / "plot.svg").read_bytes() == first
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("bad", [["--part", "3/2"], ["--part", "x"], ["--block", "0"]])
def test_impossible_options_are_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        compare.main(["ruler", *bad])
    assert stopped.value.code == 2


def test_an_unknown_policy_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["ruler", "--policies", "h3o"]) == 2
    assert "did you mean h2o" in capsys.readouterr().err
