"""Bad input ends in one sentence and exit code 2, before a model is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evictbench.models import machine, random_models
from evictbench.trace.cell import read_weight_bytes
from evictbench.trace.settings import TraceSettings, check

TINY_MODEL = ("--model", "shape:tiny")

BAD = [
    (("--policies", "h2o", "--budget", "64"), "--contexts"),
    (("--policies", "h2o", "--contexts", "64"), "h2o needs a budget"),
    (("--policies", "full", "--contexts", "64", "--budget", "9"), "No policy of --policies takes a budget"),
    (("--policies", "stream_llm", "--contexts", "64"), "did you mean streaming_llm"),
    (("--policies", ",", "--contexts", "64"), "--policies names no policy"),
    (("--policies", "oracle", "--contexts", "64", "--budget", "9"), "oracle knows what comes"),
    (("--policies", "h2o", "--contexts", "64,2k", "--budget", "9"), "--contexts takes whole numbers from 1 to"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--batch-size", "0"), "--batch-size takes whole"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9,plenty"), "'plenty' is not a number"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--prefill", "lazy"), "Unknown value 'lazy'"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--new-tokens", "0"), "--new-tokens is 0"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--retention", "0"), "--retention is 0"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--seed", "-1"), "--seed is -1"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--text", "no.txt"), "has no tokenizer"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--weights", "h2o=x"), "Unknown learned policy 'h2o'"),
    (("--policies", "kvpop", "--contexts", "64", "--budget", "99", "--weights", "kvpop"), "takes POLICY=FOLDER"),
    (("--policies", "kvpop", "--contexts", "64", "--budget", "99", "--weights", "kvpop=./no"), "no folder ./no"),
    (("--policies", "random", "--contexts", "64", "--budget", "9"), "random needs a budget of at least 37 entries"),
    (("--policies", "dms", "--contexts", "64", "--budget", "60"), "dms cannot be traced with random weights"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--device", "balanced"), "lies on one device"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--device", "gpu"), "There is no device 'gpu'"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--out", "mine"), "not the folder of a trace"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--out", "broken"), "not the record of a trace"),
    (("--policies", "h2o", "--contexts", "64", "--budget", "9", "--model", "shape:qwen4"), "Unknown shape 'qwen4'"),
    (("--policies", "h2o", "--contexts", "8190", "--budget", "9", "--model", "smollm2"), "longer than the window"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[" ".join(arguments[-2:]) for arguments, _ in BAD])
def test_bad_input_is_a_sentence(
    main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: Any, sentence: str
) -> None:
    monkeypatch.setattr(random_models, "build", lambda *_: pytest.fail("a model was made"))
    for folder, file in (("mine", "notes.txt"), ("broken", "trace.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text('{"cells": ')
    code, out, err = main("trace", *(() if "--model" in arguments else TINY_MODEL), *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err
    assert not (tmp_path / "results").exists()


def test_a_text_that_is_too_short_says_by_how_much(main: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    arguments = ("--policies", "h2o", "--contexts", "64", "--budget", "9", "--text", "short.txt")
    code, _, err = main("trace", *arguments)
    assert code == 2
    assert "short.txt has 3 tokens, and the longest context with the new ones takes 192" in err


def test_names_and_numbers_are_refused_with_nothing_heavy_imported(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom evictbench.cli.app import main\n"
        "try:\n    main(['trace', '--policies', 'h2o', '--contexts', '64', '--budget', '0'])\n"
        "finally:\n    print([name for name in ('torch', 'transformers', 'pandas', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stdout.strip() == "[]"


def test_the_cells_stand_side_by_side_with_the_full_cache_first() -> None:
    checked = check(TraceSettings("h2o:group=max,tova,h2o:group=max", "9,3", "64,25%", batch_size="2,1"))
    assert list(checked.chosen) == ["full", "h2o:group=max", "tova"]
    first = [(cell.policy, cell.budget) for cell in checked.cells[:5]]
    assert first == [
        ("full", None),
        *((label, budget) for label in ("h2o:group=max", "tova") for budget in ("64", "25%")),
    ]
    assert [(cell.context, cell.rows) for cell in checked.cells[::5]] == [(3, 1), (3, 2), (9, 1), (9, 2)]
    assert TraceSettings("h2o", "9").folder != TraceSettings("h2o", "10").folder
    assert TraceSettings("h2o", "9", model="shape:qwen3-8b").folder.name.startswith("shape-qwen3-8b-")


@pytest.mark.parametrize("name", list(random_models.SHAPES))
def test_a_shape_has_as_many_parameters_as_its_model(name: str) -> None:
    from transformers import AutoModelForCausalLM

    from evictbench.models.supported import check_supported

    shape = random_models.SHAPES[name]
    check_supported(shape.config())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    tied = shape.sizes["tie_word_embeddings"]
    embedding = 0 if tied else shape.sizes["vocab_size"] * shape.sizes["hidden_size"]
    assert read_weight_bytes(model) == 2 * (shape.parameters - embedding)


def test_the_bundled_model_has_its_shape() -> None:
    from evictbench.models import load

    sizes = random_models.SHAPES["smollm2-135m"].sizes
    config = load.load_config(load.resolve("smollm2")).to_dict()
    assert {name: config[name] for name in sizes if not name.endswith("token_id")} == {
        name: size for name, size in sizes.items() if not name.endswith("token_id")
    }


def test_weights_larger_than_the_memory_are_refused(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**33, "total": 2**33}))
    arguments = (
        "--policies",
        "h2o",
        "--contexts",
        "64",
        "--budget",
        "9",
        "--device",
        "cpu",
        "--model",
        "shape:qwen3-8b",
    )
    code, _, err = main("trace", *arguments)
    assert code == 2
    assert "The weights of shape:qwen3-8b take 15.3 GiB in bfloat16, and cpu has 8.0 GiB" in err


def test_copy_bandwidth_counts_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 4, 10, 12, 20, 28, *(range(30, 60, 3))])
    monkeypatch.setitem(machine.MOST_COPIED, "cpu", 2**21)
    monkeypatch.setattr(machine, "time", type("Time", (), {"perf_counter": lambda: next(ticks)}))
    assert machine.copy_bandwidth(torch.device("cpu")) == 2 * 2**21 / 2
