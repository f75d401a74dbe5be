"""`evictbench run` as a process: its table, going on after Ctrl-C and SIGKILL, two at once."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked_command
import pytest
from fake_plugins import install_fake_generator, make_model

from evictbench.store import run_folder

HANGS = 600
"""Seconds after which a process counts as hanging, however slow the machine is."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Here once, so that no forked process has to.
    import lm_eval.tasks  # noqa: F401

    import evictbench.cli.app
    import evictbench.cli.run  # noqa: F401

    return make_model(tmp_path_factory.mktemp("models") / "tiny", weights=False)


@pytest.fixture
def start(model, tmp_path):
    """Starts `evictbench run` on the toy suite with the fake generator."""

    def start(*words, out="runs", pause="0"):
        def before():
            os.environ.update(FAKE_PAUSE=pause, COLUMNS="160", TOKENIZERS_PARALLELISM="false")
            install_fake_generator()

        line = ["run", "--suite", "toy", "--model", str(model), "--out", out]
        if "--policy" not in words:
            line += ["--policy", "hoard", "--budget", "16"]
        return forked_command.start([*line, *words], tmp_path, before)

    return start


@pytest.fixture
def run(start):
    """Runs it to its end: exit code, stdout, stderr."""
    return lambda *words, **more: start(*words, **more).finish()


def folder_in(root):
    (folder,) = root.glob("toy/tiny/*")
    return folder


def essence(folder):
    return {
        key: (line["prompt_hash"], line["tokens"], line["score"], line["text"])
        for key, line in run_folder.read_samples(folder).items()
    }


def wait_for(condition, process):
    deadline = time.monotonic() + HANGS
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return
        time.sleep(0.002)
    raise AssertionError(f"it did not come to that: {process.finish()}")


def wait_for_samples(root, count, process):
    def there():
        files = list(root.glob("toy/tiny/*/samples.jsonl"))
        return count == 0 or (files and files[0].read_bytes().count(b"\n") >= count)

    wait_for(there, process)


def test_a_run_says_what_it_runs_shows_a_table_and_what_to_type_next(run):
    code, out, err = run()
    assert code == 0, err
    assert err.startswith("8/8 done, score ")
    assert err.count("\n") == 1
    for said in (
        "model     tiny, float32",
        "policy    hoard (size=3, decay=0.5",
        "budget    16 entries per KV head",
        "toy in 256 tokens, seed 0: toy_recall, toy_pairs (4 samples each)",
        "question  unseen",
        "prefill   native (bounded), chunks of 512 tokens",
        "protocol  default",
        "answers   at most 12 to 20 tokens (auto), greedy",
        "finds     differences of the mean over tasks of 80.1 points and more from another run",
        "skipped   toy_songs: no songs in --data-dir.",
        "toy_recall",
        "mean",
        "2 kB",
        "5 MB",
        "written to runs/toy/tiny/hoard-16-",
        "next: evictbench run --policy full --suite toy --model",
    ):
        assert said in out, said
    assert "\x1b" not in out
    code, out, _ = run()
    assert code == 0
    assert "8 of 8 samples are there from before" in out


def test_what_differs_from_the_protocol_is_said_and_written(run):
    line = ("--temperature", "0.7", "--top-k", "20", "--repeats", "3", "--chat", "off", "--at", "2", "--limit", "2")
    code, out, err = run(*line)
    assert code == 0, err
    for said in (
        "differs   temperature 0.7, not 0; top_k 20, not 0; repeats 3, not 1; chat off, not on",
        "answers   at most 12 to 20 tokens (auto), temperature 0.7, top-k 20, 3 per document",
        "toy_recall, toy_pairs (2 samples each)",
        "plain text",
        "avg@3",
        "pass@2",
        "2 x 3",
        "next: evictbench run --policy full --suite toy --limit 2 --model",
        "--chat off --repeats 3 --at 2 --temperature 0.7 --top-k 20",
    ):
        assert said in out, said
    code, out, _ = run(*line, "--json")
    summary = json.loads(out)
    assert summary["differs"]["repeats"] == {"used": 3, "protocol": 1}
    assert summary["identity"]["protocol"]["differs"] == ["chat", "temperature", "top_k"]
    assert summary["tasks"]["toy_pairs"]["k"] == 2


def test_a_system_prompt_is_said_and_written(run, tmp_path):
    code, out, err = run("--system-prompt", "You recall.", "--limit", "1")
    assert code == 0, err
    for said in (
        "differs   system_prompt You recall., not none",
        "chat template with a system prompt",
        "--system-prompt 'You recall.'",
    ):
        assert said in out, said
    identity = run_folder.read_run(folder_in(tmp_path / "runs"))["identity"]
    assert identity["protocol"]["system_prompt"] == "You recall."


def test_json_is_all_that_stdout_holds(run):
    code, out, err = run("--json", "--limit", "2")
    assert code == 0
    summary = json.loads(out)
    assert summary["tasks"]["toy_recall"]["samples"] == 2
    assert summary["identity"]["budget"] == "16"
    assert "written to" in err


def test_the_command_that_comes_next_runs_as_it_is(run):
    _, out, _ = run("--limit", "2")
    code, out, err = run(*shlex.split(out.split("next: evictbench run ")[1]))
    assert code == 0, err
    assert "next: evictbench list policies" in out


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(start, run, tmp_path):
    process = start("--limit", "40", pause="0.05")
    wait_for_samples(tmp_path / "runs", 6, process)
    process.send_signal(signal.SIGINT)
    code, _, err = process.finish()
    assert code == 130
    kept = essence(folder_in(tmp_path / "runs"))
    assert 6 <= len(kept) < 80
    last = err.strip().splitlines()[-1]
    assert last.startswith(f"Stopped; {len(kept)} finished samples are kept. To go on: evictbench run --suite toy")
    assert "Traceback" not in err
    summary = json.loads((folder_in(tmp_path / "runs") / "summary.json").read_text())
    assert summary["mean"]["samples"] == len(kept)
    assert run(*shlex.split(last.split("To go on: evictbench run ")[1]))[0] == 0
    assert len(essence(folder_in(tmp_path / "runs"))) == 80


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_before_the_first_sample_is_one_line(start, tmp_path, number, code):
    process = start("--limit", "1", pause="1000")
    wait_for(lambda: list((tmp_path / "runs").glob("toy/tiny/*/run.json")), process)
    process.send_signal(number)
    ended, _, err = process.finish()
    assert ended == code
    assert "Traceback" not in err
    assert err.startswith("Stopped")
    assert ". To go on: evictbench run --suite toy" in err
    assert err.count("\n") == 1


def test_sigterm_keeps_what_is_finished_and_a_second_signal_of_the_same_ending_breaks_nothing(start, tmp_path):
    process = start("--limit", "8", pause="0.3")
    wait_for_samples(tmp_path / "runs", 2, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    code, _, err = process.finish()
    assert code in (143, 129)  # the first that the process is given
    kept = essence(folder_in(tmp_path / "runs"))
    assert err.strip().splitlines()[-1].startswith(f"Stopped; {len(kept)} finished samples are kept. To go on:")
    summary = json.loads((folder_in(tmp_path / "runs") / "summary.json").read_text())
    assert summary["mean"]["samples"] == len(kept) < 16


def test_a_run_killed_at_random_moments_ends_as_an_unbroken_one(start, run, tmp_path):
    """SIGKILL, wherever it falls: same ids, same tokens, same scores."""
    assert run("--limit", "30", out="whole")[0] == 0
    whole = essence(folder_in(tmp_path / "whole"))
    broken = tmp_path / "broken"
    codes = []
    for least in (0, 3, 9, 15, 21, 27, 33, 39):
        process = start("--limit", "30", out="broken", pause="0.004")
        wait_for_samples(broken, least, process)
        time.sleep(random.uniform(0, 0.03))
        process.kill()
        codes.append(process.finish()[0])
    assert set(codes) <= {-signal.SIGKILL, 0}  # one that is given little time by the system may have ended by then
    assert codes[0] == -signal.SIGKILL
    code, _, err = run("--limit", "30", out="broken")
    assert code == 0, err
    assert essence(folder_in(broken)) == whole
    lines = (folder_in(broken) / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == len(whole) == 60
    assert all(line.endswith(b"\n") for line in lines)
    summaries = [json.loads((folder_in(tmp_path / name) / "summary.json").read_text()) for name in ("whole", "broken")]
    assert summaries[0]["tasks"] == summaries[1]["tasks"]


def test_a_line_torn_by_the_kill_is_made_again(run, tmp_path):
    assert run("--limit", "3")[0] == 0
    file = folder_in(tmp_path / "runs") / "samples.jsonl"
    whole = essence(file.parent)
    file.write_bytes(file.read_bytes()[:-70])
    code, out, err = run("--limit", "3")
    assert code == 0, err
    assert "5 of 6 samples are there from before" in out
    assert essence(file.parent) == whole


def test_a_second_run_of_the_same_cell_is_refused_and_of_another_is_not(start, run, tmp_path):
    first = start("--limit", "60", pause="0.2")
    wait_for_samples(tmp_path / "runs", 2, first)
    code, _, err = run("--limit", "60")
    assert code == 2
    assert err.startswith("error: Another run is writing to runs/toy/tiny/hoard-16-")
    assert err.count("\n") == 1
    assert run("--policy", "hoard", "--budget", "17", "--limit", "1")[0] == 0
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    assert first.finish()[0] == 130


def test_a_failure_deep_inside_is_one_line_and_exit_code_1(run):
    code, _, err = run(pause="not a number")
    assert code == 1
    assert err.count("\n") == 1
    assert err.startswith("error: ValueError: could not convert string to float")
    assert "--debug shows the traceback" in err
    _, _, err = run("--debug", pause="not a number")
    assert "Traceback" in err


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "evictbench", "--version"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.stdout.startswith("evictbench ")


def test_a_new_process_does_the_same(environment, model, tmp_path):
    """The whole of it once without forking: a fresh interpreter, warnings of its libraries included."""
    line = f"run --suite toy --policy hoard --budget 16 --limit 1 --model {model}"
    done = subprocess.run(
        [sys.executable, "-m", "fake_command", *line.split()],
        capture_output=True,
        text=True,
        env=environment | {"FAKE_GENERATOR": "1"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("2/2 done, score ")
    assert done.stderr.count("\n") == 1
    assert "toy_recall" in done.stdout
