"""`evictbench plot` from the command line: files, text, and a sentence with exit code 2 for what cannot be drawn."""

import csv
import io
import json
import os
import subprocess
import sys

import pytest
from plot_records import retention, right, steps, write_grid, write_run, write_trace

import evictbench
from evictbench.cli import app
from evictbench.plot.data import budget_points


@pytest.fixture
def plot(capsys):
    def call(*words):
        with pytest.raises(SystemExit) as ended:
            app.main(["plot", *map(str, words)])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


@pytest.fixture
def grid(tmp_path):
    write_grid(tmp_path / "runs")
    return tmp_path / "runs"


def test_pictures_of_all_there_is(plot, grid, tmp_path):
    out = tmp_path / "new" / "plots"
    code, said, err = plot(grid, "--out", out)
    assert (code, err) == (0, "")
    names = {
        f"{figure}-ruler-tiny.{form}" for figure in ("budget", "bytes", "errors", "answers") for form in ("png", "svg")
    }
    assert {file.name for file in out.iterdir()} == names
    assert all(name in said for name in names)
    assert (out / "budget-ruler-tiny.png").read_bytes().startswith(b"\x89PNG")
    svg = (out / "budget-ruler-tiny.svg").read_text()
    assert "h2o" in svg
    assert "</svg>" in svg


def test_what_is_written_and_what_comes_next_are_said_apart_from_numbers(plot, grid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = write_trace(tmp_path / "fast", steps())
    words = ("--figures", "budget", "--policy", "h2o,full", "--where", "question=unseen")
    code, out, err = plot("runs", *words, "--format", "png")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "written to results/plots/budget-ruler-tiny.png",
        "next: evictbench report runs --policy h2o,full --where question=unseen",
    ]
    assert plot("runs", *words, "--format", "png", "--quiet") == (0, "", "")
    _, out, err = plot("runs", *words, "--format", "csv,png")
    assert "written" not in out
    assert err.startswith("written to results/plots/budget-ruler-tiny.png\nnext: ")
    _, out, _ = plot(trace, "--figures", "latency", "--format", "png")
    assert out.splitlines()[-1] == f"next: evictbench plot {trace} --format table"
    (tmp_path / "results" / "runs").mkdir()
    _, out, _ = plot(trace, "--figures", "latency", "--format", "png")
    assert out.splitlines()[-1] == f"next: evictbench report results/runs --trace {trace}"


def test_the_same_picture_again_is_the_same_file(plot, grid, tmp_path):
    for folder in ("a", "b"):
        plot(grid, "--figures", "budget", "--format", "svg", "--out", tmp_path / folder)
    assert (tmp_path / "a" / "budget-ruler-tiny.svg").read_bytes() == (
        tmp_path / "b" / "budget-ruler-tiny.svg"
    ).read_bytes()


def test_csv_is_the_numbers_of_the_picture(plot, grid):
    code, out, _ = plot(grid, "--figures", "budget", "--format", "csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out.strip())))
    want = budget_points({"": evictbench.results(grid)}).set_index(["policy", "budget"])
    assert len(rows) == len(want) == 7
    for row in rows:
        if row["budget"]:
            assert float(row["value"]) == want.loc[(row["policy"], row["budget"]), "value"]
            assert float(row["low"]) == want.loc[(row["policy"], row["budget"]), "low"]


def test_tables_for_eyes_papers_and_pages(plot, grid):
    _, table, _ = plot(grid, "--figures", "budget", "--format", "table")
    assert "ruler on tiny: niah, 10 samples" in table
    assert [word in table for word in ("h2o", "0.8", "entries")] == [True] * 3
    _, markdown, _ = plot(grid, "--figures", "errors", "--format", "markdown", "--policy", "h2o")
    lines = markdown.strip().splitlines()
    assert lines[:2] == ["**ruler on tiny: niah, 10 samples prefill native, question unseen**", ""]
    assert lines[2] == "| policy | budget | repetition | over_long | wrong | score | documents |"
    assert lines[4] == "| h2o | 64 | 0 | 0 | 0.6 | 0.4 | 10 |"
    _, latex, _ = plot(grid, "--figures", "errors", "--format", "latex", "--policy", "h2o")
    assert r"policy & budget & repetition & over\_long & wrong & score & documents \\" in latex
    assert r"\toprule" in latex
    assert not (grid.parent / "results").exists()


def test_no_label_becomes_a_formula_or_markup(plot, tmp_path):
    """A spreadsheet runs what begins with these; a page and a paper would take the rest for their own."""
    labels = ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "a|b", "*x", "[y", "<b>z</b>"]
    for label in labels:
        write_run(tmp_path / "runs", right(1, 3), policy=label)
    _, out, _ = plot(tmp_path / "runs", "--figures", "budget", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out.strip())))
    assert sorted(row["policy"] for row in rows) == sorted(
        f"'{label}" if label[0] in "=+-@" else label for label in labels
    )
    assert {float(row["value"]) for row in rows} == {1 / 3}
    _, out, _ = plot(tmp_path / "runs", "--figures", "budget", "--format", "markdown")
    head, *lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len(lines) == 1 + len(labels)
    assert all(line.replace("\\|", "").count("|") == head.count("|") for line in lines)
    assert "\\<b\\>z" in out
    _, out, _ = plot(tmp_path / "runs", "--figures", "budget", "--format", "latex")
    body = out.split("\\midrule")[1]
    assert not any(line.startswith(("[", "*")) for line in body.splitlines())
    assert r"\textless{}b\textgreater{}z" in body


def test_filters_and_panels(plot, tmp_path):
    for question in ("seen", "unseen"):
        write_grid(tmp_path / "runs" / question, question=question)
    code, out, _ = plot(tmp_path / "runs", "--where", "question=seen", "--figures", "budget", "--format", "csv")
    assert code == 0
    assert len(out.strip().splitlines()) == 8
    code, out, _ = plot(tmp_path / "runs", "--by", "question", "--figures", "budget", "--format", "csv")
    assert code == 0
    assert {row["panel"] for row in csv.DictReader(io.StringIO(out.strip()))} == {"question seen", "question unseen"}


CHANGES = [
    ({"context": 1024}, {"context_1024", "context_512"}),
    ({"context": 1024, "question": "seen"}, {"context_1024", "context_512"}),
    ({"seed": 1}, {"seed_0", "seed_1"}),
    ({"prefill": "bounded", "chunk": 512}, {"prefill_bounded", "prefill_native"}),
    ({"data": {"generator": "version 2"}}, {"data_of_generator_version_1", "data_of_generator_version_2"}),
    ({"settings": {"group": "max"}}, None),
]


@pytest.mark.parametrize(("changes", "ends"), CHANGES)
def test_each_protocol_is_a_figure_of_its_own(plot, tmp_path, changes, ends):
    for more in ({}, changes):
        write_run(tmp_path / "runs", right(1, 3), **more)
        write_run(tmp_path / "runs", right(2, 3), policy="tova", **more)
    write_run(tmp_path / "runs", right(3, 3), policy="full", budget=None)
    code, said, err = plot(tmp_path / "runs", "--figures", "budget", "--format", "svg", "--out", tmp_path / "plots")
    assert (code, err) == (0, "")
    names = {file.stem.removeprefix("budget-ruler-tiny-") for file in (tmp_path / "plots").iterdir()}
    assert ends is None or names == ends
    assert len(names) == said.count("written to") == 2 * (1 if ends else 2)
    _, out, _ = plot(tmp_path / "runs", "--figures", "budget", "--json")
    figures = json.loads(out)
    assert all(figure["title"].startswith("ruler on tiny, ") for figure in figures)
    if "prefill" in changes or "settings" in changes:  # the full cache stands in every one
        assert all("full" in {row["policy"] for row in figure["rows"]} for figure in figures)


def test_a_title_says_how_prompts_were_read(plot, tmp_path):
    root = tmp_path / "runs"
    write_run(root, right(1, 3), prefill="bounded", question="seen")
    write_run(root, right(2, 3), prefill="native", question="seen", policy="tova")
    write_run(root, right(3, 3), policy="full", budget=None, prefill="dense", question="seen")
    _, out, _ = plot(root, "--figures", "budget,bytes", "--allow", "prefill", "--json")
    (title,) = {figure["title"] for figure in json.loads(out)}
    assert title == "ruler on tiny: niah, 3 samples\nprefill bounded and prefill native, question seen"
    _, out, _ = plot(root, "--figures", "errors", "--policy", "full", "--json")
    assert json.loads(out)[0]["title"].endswith("\nno prompt is cut, question seen")


def test_what_cannot_be_drawn_does_not_keep_the_rest_from_it(plot, tmp_path):
    write_run(tmp_path / "runs", right(1, 3))
    write_run(tmp_path / "runs", right(1, 3), context=1024)
    write_run(tmp_path / "runs", right(1, 3, task="vt"), tasks=("vt",), context=1024, policy="tova")
    code, out, err = plot(tmp_path / "runs", "--figures", "budget", "--format", "csv")
    assert code == 0
    assert err == (
        "warning: ruler, tiny, context 1024 is not drawn: No task was run under every policy and budget: choose with "
        "--task (niah, vt).\n"
    )
    assert len(out.strip().splitlines()) == 2


def test_each_suite_and_model_is_a_figure_of_its_own(plot, tmp_path):
    for suite, model in (("ruler", "a/b"), ("ruler", "c"), ("lm-eval:gsm8k_cot", "c")):
        write_run(tmp_path / "runs", right(1, 3), suite=suite, model=model)
    plot(tmp_path / "runs", "--figures", "budget", "--format", "png", "--out", tmp_path / "plots")
    names = sorted(file.name for file in (tmp_path / "plots").iterdir())
    assert names == ["budget-lm-eval_gsm8k_cot-c.png", "budget-ruler-a_b.png", "budget-ruler-c.png"]


def test_unlike_samples_are_said_on_stderr(plot, tmp_path):
    write_run(tmp_path, right(1, 3))
    write_run(tmp_path, right(1, 5), policy="tova")
    code, _, err = plot(tmp_path, "--format", "csv")
    assert code == 0
    assert "warning: ruler, tiny: Not every policy and budget has the same samples of niah (3 to 5" in err
    code, out, err = plot(tmp_path, "--format", "csv", "--figures", "budget", "--paired")
    assert err == ""
    assert {row["documents"] for row in csv.DictReader(io.StringIO(out.strip()))} == {"3"}


def test_a_trace_is_drawn_from_its_folder(plot, tmp_path):
    folder = write_trace(tmp_path / "fast", steps(), retention())
    code, _, err = plot(folder, "--out", tmp_path / "plots", "--format", "png")
    assert (code, err) == (0, "")
    names = {file.name for file in (tmp_path / "plots").iterdir()}
    assert names == {"latency-fast.png", "memory-fast.png", "retention-fast.png", "kept-fast.png"}
    code, out, _ = plot(folder, "--figures", "memory", "--format", "csv", "--policy", "h2o")
    assert code == 0
    assert {row["policy"] for row in csv.DictReader(io.StringIO(out.strip()))} == {"h2o"}


BAD = [
    (("--metric", "scoer"), "Unknown metric 'scoer': did you mean score or"),
    (("--by", "contxt"), "Unknown column 'contxt': did you mean context?"),
    (("--task", "niahh"), "Unknown task 'niahh' in these results: did you mean niah?"),
    (("--suite", "rulr"), "Unknown suite 'rulr' in these results: did you mean ruler?"),
    (("--model", "tinny"), "Unknown model 'tinny' in these results: did you mean tiny?"),
    (("--policy", "h20"), "Unknown policy 'h20' in these results: did you mean h2o?"),
    (("--figures", "budgets"), "Unknown figure 'budgets': did you mean budget or"),
    (("--figures", "latency"), "The figure latency is of a trace"),
    (("--figures", "fidelity"), "has no KL and no perplexity"),
    (("--format", "pgn"), "Unknown format 'pgn': did you mean png"),
    (("--where", "seen"), "--where takes column=value"),
    (("--allow", "promt"), "Unknown column 'promt'"),
    (("--metric", "decode_seconds"), "plot a trace"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD)
def test_bad_input_is_one_sentence(plot, grid, words, sentence):
    code, out, err = plot(grid, *words)
    assert code == 2
    assert out == ""
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_folders_without_results_are_a_sentence(plot, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder, sentence in (("nowhere", "There is no folder"), ("empty", "There are no results in")):
        code, _, err = plot(tmp_path / folder, "--out", tmp_path / "plots")
        assert code == 2
        assert sentence in err
    assert not (tmp_path / "plots").exists()


def test_a_folder_that_cannot_be_written_is_a_sentence(plot, grid, tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    real = os.access  # which always lets root write
    monkeypatch.setattr(os, "access", lambda path, mode: real(path, mode) and "locked" not in str(path))
    code, _, err = plot(grid, "--out", tmp_path / "locked" / "plots")
    assert code == 2
    assert "no permission" in err


def test_a_file_in_the_way_is_a_sentence(plot, grid, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = plot(grid, "--out", tmp_path / "file" / "plots")
    assert code == 2
    assert "is a file; plots need a folder" in err


def test_no_write_permission_found_late_is_a_sentence(plot, grid, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Figure, "savefig", refuse)
    code, _, err = plot(grid, "--out", tmp_path / "plots")
    assert code == 1
    assert err.startswith(
        f"error: {tmp_path / 'plots' / 'budget-ruler-tiny.png'} cannot be written: Permission denied."
    )
    assert "To go on: evictbench" in err
    assert list((tmp_path / "plots").iterdir()) == []


def test_plotting_and_its_help_import_no_torch(grid):
    code = (
        "import sys\nfrom evictbench.cli import app\ntry:\n    app.main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'pandas', 'matplotlib', 'pyarrow', 'scipy'}\n"
        "print('IMPORTED', *sorted(heavy & set(sys.modules)))"
    )

    def imported(*words):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        return done.stdout.rpartition("IMPORTED")[2].split()

    assert imported("plot", "--help") == []
    assert not {"torch", "transformers"} & set(imported("plot", str(grid), "--format", "csv"))


def test_the_same_numbers_are_printed_once(plot, grid):
    _, both, _ = plot(grid, "--figures", "budget,bytes", "--format", "table")
    _, one, _ = plot(grid, "--figures", "budget", "--format", "table")
    assert both == one
