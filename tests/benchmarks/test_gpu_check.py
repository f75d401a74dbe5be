"""The check for GPUs, as far as a CPU can tell: that it runs with what is there, that it finds what is planted, what it
says of goals, and that nothing is tried that cannot fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graph_recording import on_tape

from benchmarks import gpu_check, gpu_equality
from benchmarks.gpu_check import DMS_MEAN, FULL, KVPOP, NONE, Plan, contenders, goals, main, shown
from benchmarks.gpu_decode import Bench, Line
from benchmarks.gpu_equality import Equality, compare, small_model
from benchmarks.random_policies import names, policy_for
from benchmarks.recorded_step import RecordedStep
from evictbench import registry

ROOT = Path(__file__).resolve().parent.parent.parent

# Of our dependencies a machine with torch and transformers need not have these.
ABSENT = [
    *("gguf", "lm_eval", "datasets", "pandas", "pyarrow", "matplotlib", "scipy", "statsmodels", "platformdirs"),
    *("wonderwords", "math_verify", "rouge", "rapidfuzz", "jieba", "ray", "accelerate", "evictbench.policies"),
]


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def tiny_bench(model, **settings):
    plan = Plan(tiny=True)
    return plan, Bench(model, contenders(model, plan), lambda: 1.0, None, runs=1, steps=1, **settings)


def test_it_runs_where_only_torch_and_transformers_are(tmp_path):
    out = tmp_path / "RESULTS.md"
    absent = f"import sys\nfor name in {ABSENT!r}: sys.modules[name] = None\n"
    run = f"from benchmarks.gpu_check import main\nsys.exit(main(['--device', 'cpu', '--tiny', '--out', {str(out)!r}]))"
    done = subprocess.run([sys.executable, "-c", absent + run], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert text.count("kept sets differ") == len(names())
    assert f"policies equal to the CPU's | {len(names())} of {len(names())} | met" in text
    lines = [line for line in text.splitlines() if line.startswith(f"| {KVPOP} |") and "kept sets" not in line]
    assert len(lines) == 3 * 2 + 1
    assert "Times of so small a model mean nothing" in text


def test_every_policy_of_the_package_is_checked():
    assert sorted(names()) == sorted(registry.names(registry.POLICIES))


def test_a_policy_that_differs_on_the_device_is_found(model, monkeypatch):
    made = iter([0, 1])
    monkeypatch.setattr(
        gpu_equality, "policy_for", lambda name, config, window: policy_for(name, config, window, seed=next(made))
    )
    found = compare("kvpop_mlp", model, "cpu", (200, 150), 3)
    assert found.differing > 0
    assert not found.equal


def test_logits_that_differ_are_found(model, monkeypatch):
    moments = gpu_equality.moments
    other = iter([0.0, 0.1])

    def changed(*arguments):
        more = next(other)
        for kept, logits in moments(*arguments):
            yield kept, logits + more * logits.abs().max()

    monkeypatch.setattr(gpu_equality, "moments", changed)
    found = compare("tova", model, "cpu", (200, 150), 2)
    assert found.differing == 0
    assert found.logits == pytest.approx(0.1, rel=1e-3)
    assert not found.equal


def test_a_policy_that_fails_is_a_line_and_not_the_end(model):
    found = compare("no_such_policy", model, "cpu", (20,), 1)
    assert found.verdict.startswith("failed: KeyError")
    assert not found.equal


def test_what_cannot_fit_is_a_line_and_is_not_tried(model, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_decode.filled", None)
    plan, bench = tiny_bench(model, room=lambda: 0)
    lines = [*bench.cell(plan.lengths[-1], 2), *bench.prompts(plan.prompt, plan.chunk)]
    assert len(lines) == 2 * len(bench.contenders)
    assert all(line.note.startswith("does not fit: ") and line.seconds is None for line in lines)


def test_after_the_time_limit_nothing_is_begun(model):
    plan, bench = tiny_bench(model)
    bench.seconds_left = lambda: -1.0
    assert {line.note for line in bench.cell(plan.lengths[0], 1)} == {"no time"}
    assert all(line.note.startswith("no time: 96 of 384") for line in bench.prompts(plan.prompt, plan.chunk))


def test_recorded_steps_are_measured_beside_plain_ones_and_failures_are_said(model):
    plan, bench = tiny_bench(model)
    bench.record = on_tape([])
    lines = {line.name: line for line in bench.cell(plan.lengths[0], 2)}
    assert all(line.seconds for line in lines.values())
    assert [name for name, line in lines.items() if line.recorded is None] == [DMS_MEAN, "dms, 25%"]
    assert lines[DMS_MEAN].note == "no graph: pages change hands between steps"

    def fails(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    bench.record = fails
    lines = {line.name: line for line in bench.cell(plan.lengths[0], 1)}
    assert lines[KVPOP].recorded is None
    assert lines[KVPOP].note == "no graph: RuntimeError: operation not permitted when stream is capturing"
    assert lines[KVPOP].seconds


def test_what_fails_is_said_in_the_lines(model, monkeypatch):
    plan, bench = tiny_bench(model)

    def fails(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("benchmarks.gpu_decode.in_turns", fails)
    lines = list(bench.cell(plan.lengths[0], 1))
    assert {line.note.partition(";")[0] for line in lines} == {"OutOfMemoryError: CUDA out of memory"}
    assert not any(line.seconds for line in lines)
    monkeypatch.setattr("benchmarks.gpu_decode.filled", fails)
    assert {line.note for line in bench.cell(plan.lengths[0], 1)} == {"OutOfMemoryError: CUDA out of memory"}


def test_a_failed_recording_leaves_the_cache_its_own_begin(model):
    plan, bench = tiny_bench(model)
    one = next(one for one in bench.contenders if one.name == "h2o")
    arm, _ = bench._start(one, plan.lengths[0], 1)

    def fails(run):
        run()
        raise RuntimeError("not recorded")

    with pytest.raises(RuntimeError, match="not recorded"):
        RecordedStep(arm.runner, arm.cache, arm.tokens(), fails)
    arm.step()
    assert arm.cache.seen == [plan.lengths[0] + 3 + 1 + 1]


def planted(ratio, overhead, growth):
    plan = Plan(tiny=False)
    lines = []
    for seen in plan.lengths:
        for rows in plan.rows:
            for name in (FULL, NONE, "streaming_llm", "h2o", KVPOP, DMS_MEAN):
                base = 10.0 if name == FULL else 10.0 * ratio * (1 if name == NONE else overhead)
                size = 1000 if seen == plan.lengths[0] else round(1000 * growth)
                lines.append(Line(name, seen, rows, 4095.0, base, base, size, size))
    return plan, lines


def test_goals_are_met_or_missed_by_what_is_measured():
    plan, lines = planted(ratio=0.3, overhead=1.05, growth=1.0)
    found = [Equality("h2o", 10), Equality("tova", 10)]
    assert not any("missed" in row[-1] for row in goals(lines, found, plan))
    for changed in ({"ratio": 0.5}, {"overhead": 1.2}, {"growth": 1.1}):
        plan, lines = planted(**{"ratio": 0.3, "overhead": 1.05, "growth": 1.0} | changed)
        assert any("missed by" in row[-1] for row in goals(lines, found, plan)), changed
    plan, lines = planted(ratio=0.5, overhead=1.0, growth=1.0)
    missed = [row[0] for row in goals(lines, found, plan) if "missed" in row[-1]]
    assert missed == [f"kvpop: {how} over full, 131,072 tokens, 4 rows" for how in ("step", "recorded step")]


def test_what_was_not_measured_misses_its_goal():
    plan, lines = planted(ratio=0.3, overhead=1.0, growth=1.0)
    rows = goals([line for line in lines if line.name != KVPOP], [Equality("h2o", 10, 1)], plan)
    by_goal = {row[0]: row[1:] for row in rows}
    assert by_goal["policies equal to the CPU's"] == ["0 of 1", "missed"]
    assert by_goal["kvpop: step over full, 131,072 tokens, 4 rows"] == ["not measured", "<= 0.35: missed"]
    assert goals(lines, [], plan)[0][-1] == "missed", "nothing compared is nothing equal"


def test_a_line_shows_its_sizes_with_the_weights():
    row = shown(Line("h2o", 8192, 4, 4095.0, 0.02, 0.01, 2**30, 3 * 2**30), weights=2**34)
    assert row == ["h2o", "8,192", "4", "4095", "20.00", "10.00", "400.0", "1.000", "19.00", ""]


def test_without_a_gpu_it_says_so_and_does_nothing(capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "check", None)
    assert main(["--device", "cpu"]) == 2
    assert "for a GPU" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main([]) == 2
        assert "cuda:0" in capsys.readouterr().err


def test_what_the_device_does_is_named(model):
    text = gpu_check.kernels(model, Plan(tiny=True))
    assert text.startswith(f"{FULL}:")
    assert f"{KVPOP}:" in text
    assert "| aten::" in text
    assert all(float(line.split("|")[2]) >= 0 for line in text.splitlines() if "aten::" in line)
