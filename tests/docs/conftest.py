"""A desk: a folder with a tiny model, texts, data, and policies in files, where the commands of a page are given."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A random model of two layers that speaks the bundled model's tokens and has a window of 4,096."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from evictbench.models import load

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = load.load_tokenizer(load.resolve("smollm2"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def run_here():
    """Runs words in a process of its own, in a folder: the finished process."""

    def run(words, folder, *, python=(), **environment):
        words = [sys.executable, "-m", *words]
        known = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "HF_HUB_OFFLINE": "1"}
        known["PYTHONPATH"] = os.pathsep.join(map(str, python))
        return subprocess.run(
            words, cwd=folder, env=known | environment, capture_output=True, text=True, timeout=600, check=False
        )

    return run


def keydiff():
    """The policy that the page on policies makes."""
    return blocks(ROOT / "docs/add-a-policy.md", "python")[0].text


def furnish(folder: Path) -> None:
    """What the pages take for granted: a policy in a file, texts, a book, and GSM8K's problems under DATA."""
    (folder / "keydiff.py").write_text(keydiff())
    (folder / "my_policy.py").write_text(keydiff().replace("KeyDiff(", "MyPolicy(").replace('"keydiff"', '"my_policy"'))
    lines = [" ".join(f"{word} {i * 7 % 13}." for word in ("north", "east", "south") * 60) for i in range(12)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder / "book.txt").write_text("\n".join(lines))
    (folder / "DATA").mkdir()
    problem = {"question": "Ann has 2 pens and buys 3. How many has she? " * 8, "answer": "2 + 3 = 5 pens. " * 12}
    (folder / "DATA/test.jsonl").write_text(
        "".join(json.dumps({**problem, "answer": f"{problem['answer']}#### {i}"}) + "\n" for i in range(6))
    )


@pytest.fixture
def desk(tmp_path, monkeypatch):
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


@pytest.fixture(scope="session")
def results(tiny, tmp_path_factory):
    """Runs and a trace of the tiny model, as the commands that look at results expect them."""
    from evictbench.cli.app import main

    folder = tmp_path_factory.mktemp("results")
    furnish(folder)
    shared = ["--model", str(tiny), "--limit", "3", "--max-new-tokens", "4", "--out", str(folder / "results/runs")]
    arms = (["--policy", "full"], ["--policy", "h2o", "--budget", "96"], ["--policy", "tova", "--budget", "128"])
    fidelity = ["--suite", "fidelity", "--tasks", "gsm8k", "--data-dir", str(folder / "DATA")]
    gsm8k = ["--suite", "gsm8k", "--data-dir", str(folder / "DATA")]
    for arm in arms:
        for suite in (["--suite", "ruler", "--tasks", "niah_single_1", "--context", "512"], fidelity, gsm8k):
            words = [*arm, *suite, *shared]
            if suite is fidelity:
                at = words.index("--max-new-tokens")
                del words[at : at + 2]
            with pytest.raises(SystemExit) as ended:
                main(["run", *words])
            assert ended.value.code in (0, None), words
    trace = [
        "trace",
        "--policies",
        "h2o",
        "--budget",
        "48",
        "--contexts",
        "96",
        "--new-tokens",
        "8",
        "--retention",
        "8",
    ]
    with pytest.raises(SystemExit) as ended:
        main([*trace, "--model", str(tiny), "--out", str(folder / "results/traces/NAME")])
    assert ended.value.code in (0, None)
    for name in ("main", "baseline"):
        shutil.copytree(folder / "results/runs", folder / "results" / name)
    shutil.copytree(folder / "results/traces/NAME", folder / "results/traces/first")
    return folder
