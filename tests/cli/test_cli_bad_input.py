"""Bad input ends in one sentence on stderr and exit code 2, before anything heavy is imported."""

import json
import subprocess
import sys

import pytest
from fake_plugins import make_model

from evictbench.cli import app


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", weights=False)


@pytest.fixture
def evictbench(environment, tmp_path):
    """Runs a command; gives its exit code, stdout, stderr, and the heavy libraries that it imported."""

    def call(*words):
        log = tmp_path / "heavy.json"
        done = subprocess.run(
            [sys.executable, "-m", "fake_command", *map(str, words)],
            capture_output=True,
            text=True,
            env=environment | {"HEAVY_LOG": str(log)},
            cwd=tmp_path,
            timeout=600,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr, json.loads(log.read_text())

    return call


GOOD = ("--policy", "hoard", "--budget", "16", "--suite", "toy")

LIGHT = [
    (("--policy", "stream_llm", "--suite", "ruler", "--budget", "9"), "did you mean streaming_llm"),
    (("--policy", "h2o", "--suite", "rulr", "--budget", "9"), "Unknown suite 'rulr': did you mean ruler?"),
    (("--policy", "hoard", "--suite", "toy", "--budget", "9", "--tasks", "toy_pair"), "did you mean toy_pairs"),
    (("--policy", "h2o:groop=max", "--suite", "toy", "--budget", "9"), "did you mean group?"),
    (("--policy", "h2o:group=most", "--suite", "toy", "--budget", "9"), "mean, max, sum"),
    (("--policy", "h2o", "--suite", "toy", "--budget", "0"), "keeps nothing"),
    (("--policy", "h2o", "--suite", "toy", "--budget", "-256"), "negative"),
    (("--policy", "h2o", "--suite", "toy", "--budget", "150%"), "over 100%"),
    (("--policy", "h2o", "--suite", "toy", "--budget", "plenty"), "is not a number"),
    (("--policy", "h2o", "--suite", "toy"), "h2o needs a budget"),
    (("--policy", "full", "--suite", "toy", "--budget", "9"), "full takes no budget"),
    (
        ("--policy", "h2o", "--suite", "toy", "--budget", "9", "--out", "{foreign}"),
        "not a folder of evictbench results",
    ),
    (("--policy", "h2o", "--suite", "toy", "--budget", "9", "--data-dir", "nowhere"), "There is no folder nowhere"),
    (("--policy", "h2o", "--suite", "toy", "--budget", "9", "--haystack", "nowhere"), "There is no file nowhere"),
    (("--policy", "h2o", "--suite", "toy", "--budget", "9", "--model", "./nowhere"), "nowhere"),
    (("--policy", "nowhere.py:Mine", "--suite", "toy", "--budget", "9"), "There is no policy file nowhere.py"),
    ((*GOOD, "--limit", "0"), "--limit is 0"),
    ((*GOOD, "--limit", "many"), "--limit"),
    ((*GOOD, "--prefill", "lazy"), "Unknown value 'lazy' of --prefill"),
    ((*GOOD, "--contxt", "9"), "--context"),
    ((*GOOD, "--protocol", "defualt"), "The suite toy has no protocol 'defualt': there is default."),
    (
        ("--policy", "h2o", "--suite", "gsm8k", "--budget", "9", "--protocol", "kvpop"),
        "The suite gsm8k has no protocol 'kvpop': there are default, cot8, distillcache.",
    ),
    ((*GOOD, "--repeats", "0"), "--repeats is 0; it has to be at least 1."),
    ((*GOOD, "--temperature", "1", "--repeats", "4", "--at", "5"), "--at is 5, and there are 4 answers per document"),
    ((*GOOD, "--repeats", "4"), "Greedy answers are the same every time"),
    ((*GOOD, "--top-p", "0.9"), "the protocol default of toy is greedy, where --top-p would do nothing"),
    ((*GOOD, "--thinking", "maybe"), "Unknown value 'maybe' of --thinking: there are auto, off, on."),
    ((*GOOD, "--recency", "0"), "or same, as many as a head keeps, and not '0'"),
    ((*GOOD, "--recency", "sme"), "--recency takes the number of last tokens"),
    (("--policy", "h2o"), "--suite"),
]


@pytest.mark.parametrize(("words", "sentence"), LIGHT, ids=[" ".join(words[-2:]) for words, _ in LIGHT])
def test_names_and_numbers_are_refused_with_nothing_heavy_imported(evictbench, tmp_path, words, sentence):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    code, out, err, heavy = evictbench("run", *(word.replace("{foreign}", str(foreign)) for word in words))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err
    assert heavy == []


@pytest.fixture
def main(monkeypatch, capsys, tmp_path):
    """Runs a command here, where the libraries are loaded already: exit code, stdout, stderr."""

    def call(*words):
        words = list(map(str, words))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["evictbench", *words])
        with pytest.raises(SystemExit) as ended:
            app.main(words)
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--budget", "3"), "hoard needs a budget of at least 4 entries on tiny"),
        (("--context", "513"), "longer than the window of tiny, 512 tokens"),
        (("--max-new-tokens", "500"), "more than the window of tiny, 512 tokens"),
    ],
)
def test_what_depends_on_the_model_is_refused_before_its_weights_load(main, model, words, sentence):
    """The weights of this model are not even weights: loading them would fail in another way."""
    code, out, err = main("run", *GOOD, "--model", model, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_a_model_of_which_nothing_can_be_evicted_is_refused(main, tmp_path):
    folder = make_model(tmp_path / "slides", weights=False)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    (folder / "config.json").write_text(json.dumps(config))
    code, _, err = main("run", *GOOD, "--model", folder)
    assert code == 2
    assert err.count("\n") == 1
    assert "none of its layers attends to the whole text, so that there is nothing to evict" in err


def test_weights_that_are_none_are_one_line_and_debug_shows_where(main, model, monkeypatch):
    code, _, err = main("run", *GOOD, "--model", model, "--limit", "1")
    assert code in (1, 2)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    words = list(map(str, ("run", *GOOD, "--model", model, "--limit", "1", "--debug")))
    monkeypatch.setattr(sys, "argv", ["evictbench", *words])
    with pytest.raises(Exception, match=r"\w") as raised:
        app.main(words)
    assert not isinstance(raised.value, SystemExit)


@pytest.mark.parametrize("words", [("rum",), ("list", "policy"), ("--verzion",), ("run", "extra")])
def test_the_parsers_own_errors_are_one_line_too(evictbench, words):
    code, out, err, heavy = evictbench(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert heavy == []
