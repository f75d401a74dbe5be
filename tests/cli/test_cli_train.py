"""`evictbench train` on the command line: bad input is one sentence and exit code 2, and nothing heavy before it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_plugins import make_model

from evictbench.cli import app

TOY = f"{Path(__file__).parent.parent / 'train' / 'toy_policies.py'}:Toy"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose weights are none: whoever loads them fails in another way."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", weights=False)


@pytest.fixture
def main(monkeypatch, capsys, tmp_path):
    """Runs a command here: exit code, stdout, stderr."""

    def call(*words):
        words = list(map(str, words))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["evictbench", *words])
        with pytest.raises(SystemExit) as ended:
            app.main(words)
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"word number {i} and word."}) + "\n" for i in range(30)))
    return file


def test_names_and_numbers_are_refused_with_nothing_heavy_imported(environment, tmp_path):
    """The policies are those without torch in their modules; one subprocess, for what it imports."""
    log = tmp_path / "heavy.json"
    words = ["train", "--policy", "streaming_llm", "--data", "nowhere.jsonl", "--out", "x", "--finetune"]
    done = subprocess.run(
        [sys.executable, "-m", "fake_command", *words],
        capture_output=True,
        text=True,
        env=environment | {"HEAVY_LOG": str(log)},
        cwd=tmp_path,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout, json.loads(log.read_text())) == (2, "", [])
    assert done.stderr.startswith("error: There is no file or folder nowhere.jsonl")
    assert not (tmp_path / "x").exists()


BAD = [
    (("--policy", "h2o"), "h2o has nothing to train"),
    (("--policy", "streaming_lm"), "did you mean streaming_llm"),
    (("--policy", "streaming_llm"), "streaming_llm has no scorer to train: with --finetune"),
    (("--policy", "streaming_llm", "--finetune", "--budget", "2048"), "never fill a budget of 2048"),
    (("--policy", TOY.replace("Toy", "ToyGate"), "--finetune"), "trains its own part alone"),
    (("--budget", "16,many"), "takes numbers of entries (256, or 256,512), and not 'many'"),
    (("--budget", "0"), "leaves none to choose beside a window of 4"),
    (("--budget", "4"), "leaves none to choose beside a window of 4"),
    (("--budget", "25%"), "takes numbers of entries"),
    (("--steps", "0"), "--steps is 0"),
    (("--length", "0"), "--length is 0"),
    (("--length", "4096"), "longer than the window of tiny, 512 tokens"),
    (("--held-out", "-1"), "--held-out is -1"),
    (("--held-out", "999", "--blocks", "1"), "999 are to be held out"),
    (("--lr", "0"), "--lr is 0"),
    (("--model-lr", "nan"), "'--model-lr': it takes a finite number"),
    (("--dtype", "int8"), "Unknown value 'int8' of --dtype"),
    (("--weights-dtype", "bfloat16"), "of --weights-dtype: did you mean"),
    (("--recipe", "scales=2"), "Unknown setting 'scales' of toy's recipe: did you mean scale?"),
    (("--recipe", "scale"), "has no value: write --recipe scale=..."),
    (("--no-pack", "--batch-size", "2"), "go one at a time"),
    (("--data", "{empty}"), "holds no text to train on"),
    (("--data", "{other}"), "record 1 has no text"),
    (("--data", "./nowhere"), "There is no file or folder ./nowhere (--data)"),
    (("--data", "nobody/nothing"), "neither a file here nor to be had from the hub"),
    (("--out", "{foreign}"), "is not a folder of an evictbench training (it holds notes.txt)"),
    (("--out", "{empty}"), "is a file; a training needs a folder"),
    (("--model", "./nowhere"), "There is no folder ./nowhere"),
    (("--device", "tpu"), "There is no device 'tpu'"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=[" ".join(words[-2:])[-40:] for words, _ in BAD])
def test_bad_input_is_one_sentence_before_the_weights_load(main, model, texts, tmp_path, words, sentence):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    places = {"{empty}": "empty.jsonl", "{other}": "other.jsonl", "{foreign}": "foreign"}
    given = {
        "--policy": TOY,
        "--data": texts,
        "--out": tmp_path / "out",
        "--model": model,
        "--budget": "16",
        "--window": "4",
        "--length": "32",
        "--device": "cpu",
    }
    flags = [word for word in words if word in ("--finetune", "--no-pack")]
    rest = [places.get(word, word) for word in words if word not in flags]
    given |= dict(zip(rest[::2], rest[1::2], strict=True))
    if "2048" in words:
        given["--length"] = "64"
    code, out, err = main("train", *flags, *(word for pair in given.items() for word in pair))
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert sentence in err.splitlines()[-1]


def test_what_is_missing_is_the_parsers_to_say(main):
    code, _, err = main("train", "--policy", TOY, "--out", "x")
    assert code == 2
    assert "--data" in err


def test_a_training_says_what_it_does_where_it_is_and_what_comes_next(main, texts, tmp_path):
    tiny = make_model(tmp_path / "small")
    words = ["train", "--policy", TOY, "--data", texts, "--out", tmp_path / "out", "--model", tiny, "--steps", 4]
    words += ["--budget", 16, "--window", 4, "--length", 32, "--device", "cpu"]
    code, out, err = main(*words)
    assert code == 0
    assert "scorer, the model frozen" in err
    assert "features of 6 of 6 blocks" in err
    assert "step 4 of 4" in err
    assert f"written to {tmp_path / 'out'}" in out
    assert f"--weights {tmp_path / 'out'}" in out
    code, out, _ = main(*words, "--json")
    assert code == 0
    assert json.loads(out)["training"]["steps"] == 4
    code, _, err = main(*words[:-2], "--lr", 0.01)
    assert code == 2
    assert "differs in lr" in err


def test_help_names_the_options(main):
    code, out, _ = main("train", "--help")
    assert code == 0
    for option in ("--finetune", "--held-out", "--recipe", "--no-pack", "--store"):
        assert option in out
