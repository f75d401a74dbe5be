"""Runs that cannot be held against each other: a sentence that says why, and exit code 2."""

import json

import pytest
from gate.gate_cases import right, steps, write_run, write_trace

RUN = {"policy": "h2o"}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        ({"model": "large", "weights": "sha256:1"}, "the model is tiny here and large there"),
        ({"weights": "sha256:1"}, "the weights of tiny are not the same"),
        ({"suite": "gsm8k"}, "The baseline has no h2o @ 64 on ruler"),
        ({"budget": "128"}, "The baseline has no h2o @ 64 on ruler"),
        ({"policy": "tova"}, "The baseline has no h2o @ 64 on ruler"),
        ({"question": "seen"}, "question is unseen here and seen there"),
        ({"temperature": 0.6}, "temperature is 0 here and 0.6 there"),
        ({"name": "kvpop"}, "protocol is default here and kvpop there"),
        ({"context": 1024}, "context is 512 here and 1024 there"),
        ({"prefill": "bounded"}, "prefill is native here and bounded there"),
        ({"seed": 1}, "seed is 0 here and 1 there"),
        ({"dtype": "float16"}, "dtype is float32 here and float16 there"),
        ({"data": {"generator": "version 2"}}, "the data of generator is not the same"),
    ],
)
def test_runs_that_were_not_made_in_the_same_way(gate, tmp_path, there, sentence, exact):
    write_run(tmp_path / "here", right(6, 10), **RUN)
    write_run(tmp_path / "there", right(6, 10), **RUN | there)
    words = (tmp_path / "here", "--baseline", tmp_path / "there", *(["--exact"] if exact else []))
    refused(gate(*words), sentence)


def test_other_samples(gate, tmp_path):
    write_run(tmp_path / "here", right(6, 10))
    write_run(tmp_path / "there", [line | {"doc_id": line["doc_id"] + 100} for line in right(6, 10)])
    words = (tmp_path / "here", "--baseline", tmp_path / "there")
    refused(gate(*words), "20 of 20 samples are not in both; document 0 of niah is in the runs alone")
    refused(gate(*words, "--paired"), "no document is common to the runs and the baseline")


def test_other_prompts(gate, tmp_path):
    write_run(tmp_path / "here", right(6, 10))
    write_run(tmp_path / "there", right(6, 10, prompt_hash="1" * 16))
    refused(gate(tmp_path / "here", "--baseline", tmp_path / "there"), "document 0 of niah is another prompt here")


def test_a_cell_that_only_the_baseline_has(gate, tmp_path):
    write_run(tmp_path / "here", right(6, 10))
    write_run(tmp_path / "there", right(6, 10))
    write_run(tmp_path / "there", right(6, 10), policy="tova")
    refused(
        gate(tmp_path / "here", "--baseline", tmp_path / "there"),
        "The baseline has tova @ 64 on ruler, and the runs have not",
    )


def test_the_full_cache_as_the_full_cache_is_not_asked_for_its_prefill(gate, tmp_path):
    write_run(tmp_path / "here", right(6, 10), policy="full", budget=None)
    write_run(tmp_path / "there", right(6, 10), policy="full", budget=None, prefill="bounded")
    assert gate(tmp_path / "here", "--baseline", tmp_path / "there")[0] == 0


def test_a_missing_baseline(gate, tmp_path):
    write_run(tmp_path / "here", right(6, 10))
    refused(gate(tmp_path / "here", "--baseline", tmp_path / "nowhere"), "There is no baseline")
    (tmp_path / "empty").mkdir()
    refused(gate(tmp_path / "here", "--baseline", tmp_path / "empty"), "There are no results in")


def test_a_baseline_that_is_the_runs_themselves(gate, tmp_path):
    write_run(tmp_path / "here", right(6, 10))
    for baseline in (tmp_path / "here", tmp_path / "here" / "ruler", tmp_path):
        refused(gate(tmp_path / "here", "--baseline", baseline), "are the same or one in the other")


def test_a_published_file_with_a_missing_field(gate, tmp_path, monkeypatch):
    from evictbench.store import published

    whole = published.read_published
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "kvpop.yaml").write_text("paper: '2606.00001'\ntitle: A paper\n")
    monkeypatch.setattr(published, "read_published", lambda: whole(folder))
    write_run(tmp_path / "here", right(6, 10))
    code, out, err = gate(tmp_path / "here", "--published")
    assert (code, out) == (2, "")
    assert "kvpop.yaml" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "A gate holds runs against something: --published, or --baseline FOLDER."),
        (("--exact",), "--exact is about a baseline"),
        (("--paired", "--published"), "--paired is about a baseline"),
        (("--published", "--model", "tiny"), "do not go with --published"),
        (("--baseline", "there", "--tolerance", "2"), "--tolerance is a drop in score from 0 to 1"),
        (("--baseline", "there", "--latency-tolerance", "-1"), "--latency-tolerance is a share from 0 up"),
        (("--baseline", "there", "--policy", "h3o"), "did you mean h2o?"),
        (("--baseline", "there", "--where", "question"), "--where takes column=value"),
        (("--baseline", "there", "--junit", "."), "is a folder, and jUnit"),
        (("--baseline", "there", "--trace", "there"), "There is a trace on one side alone"),
        (("--baseline", "there", "--trace", "there", "--baseline-trace", "there"), "is no trace"),
    ],
)
def test_options_that_cannot_be(gate, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    for side in ("here", "there"):
        write_run(tmp_path / side, right(6, 10))
    refused(gate("here", *words), sentence)


def test_runs_that_are_not_there(gate, tmp_path):
    refused(gate(tmp_path / "nowhere", "--published"), "There is no folder")


@pytest.mark.parametrize(
    ("about", "sentence"),
    [({"model": "large"}, "is of tiny, and the baseline's are of large"), ({"made_by": {"chunk": 7}}, "chunk is")],
)
def test_traces_of_other_models_or_other_settings(gate, tmp_path, about, sentence):
    folders = [write_trace(tmp_path / side / "trace", steps()) for side in ("here", "there")]
    file = folders[1] / "trace.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | about))
    refused(gate(folders[0].parent, "--baseline", folders[1].parent), sentence)


def test_a_trace_without_a_cell_of_the_other(gate, tmp_path):
    write_trace(tmp_path / "here" / "t", steps())
    write_trace(tmp_path / "there" / "t", steps(contexts=(256, 512)))
    refused(gate(tmp_path / "here", "--baseline", tmp_path / "there"), "has h2o @ 64 at 512 tokens, 1 row, and that in")


def test_the_gate_imports_nothing_heavy(tmp_path):
    import subprocess
    import sys

    for side in ("here", "there"):
        write_run(tmp_path / side, right(6, 10))
    script = (
        "import sys; from evictbench.cli import app\n"
        f"try: app.main(['gate', {str(tmp_path / 'here')!r}, '--baseline', {str(tmp_path / 'there')!r}])\n"
        "except SystemExit as ended: assert not ended.code, ended.code\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=600)


def refused(answer, sentence):
    code, out, err = answer
    assert sentence in err
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
