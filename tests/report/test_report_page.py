"""The file itself, without a browser: well-formed, self-contained, small, escaped, and right in what it says."""

import base64
import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys

import pytest
from plot.plot_records import right, sample, write_run
from report.report_cases import HOSTILE, WORDS, Page, answers, prompt, word_tokenizer

from evictbench.report.build import build
from evictbench.report.request import ReportRequest
from evictbench.store import run_folder
from evictbench.store.select import Filters


def packs(text):
    found = re.findall(r'<script type="text/plain" data-pack="\d+">([^<]*)</script>', text)
    return [json.loads(gzip.decompress(base64.b64decode(data))) for data in found]


@pytest.fixture(scope="session")
def text(page):
    return page.read_text()


def test_it_is_one_well_formed_page_with_ids_of_its_own(text):
    found = Page(text)
    assert not [tag for tag in found.open if tag not in ("html", "body")]
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) > 100
    targets = [attributes["href"][1:] for _, attributes in found.elements if attributes.get("href", "")[:1] == "#"]
    targets += re.findall(r"url\(#([^)]+)\)", text)
    for name in ("aria-labelledby", "aria-describedby"):
        targets += [attributes[name] for _, attributes in found.elements if name in attributes]
    assert set(targets) <= set(ids)


def test_nothing_in_it_points_outside(text):
    found = Page(text)
    for tag, attributes in found.elements:
        for name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
            assert attributes.get(name, "#")[:1] == "#" or attributes[name].startswith("data:"), (tag, attributes)
    styles = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    assert "@import" not in styles
    assert "url(" not in styles


def test_only_its_own_script_may_run(text):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1).replace("&#39;", "'")
    assert "default-src 'none'" in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_every_control_has_a_label_and_every_column_a_button(text):
    labelled, inside = 0, re.sub(r"<label.*?</label>", "", text, flags=re.DOTALL)
    assert not re.findall(r"<(?:select|input)", inside)
    labelled = len(re.findall(r"<label.*?<(?:select|input)", text, re.DOTALL))
    assert labelled == 6 + 5
    head = re.search(r'<table id="board">\s*<thead>(.*?)</thead>', text, re.DOTALL).group(1)
    assert head.count('<th scope="col"') == head.count('<button type="button">') > 10


def test_the_leaderboard_says_how_prompts_were_read(text):
    read = "prefill native, question unseen"
    assert f'<p id="reading">How prompts were read: fidelity on tiny: {read}; ruler on tiny: {read}.</p>' in text
    head = re.search(r'<table id="board">\s*<thead>(.*?)</thead>', text, re.DOTALL).group(1)
    assert ">prefill</button>" in head
    assert ">question</button>" in head
    assert text.count(">nothing is cut</td>") == 3  # the full cache's rows


def test_prompts_stand_once_for_all_policies(text):
    content = {(len(pack["arms"]), len(pack["docs"])): pack for pack in packs(text)}
    ruler = content[5, 10]
    assert len(ruler["prompts"]) == 10
    assert [len(document["arms"]) for document in ruler["docs"]] == [5] * 10
    assert ruler["arms"][0][1] == "full"
    context, question, missing = ruler["prompts"][3]
    assert context == " ".join([*WORDS[1:5], WORDS[7], "hay hay hay hay"])
    assert (question, missing) == ("what ?", "")
    hostile = ruler["docs"][0]["arms"][str([name for _, name in ruler["arms"]].index("tova 128"))]
    assert hostile["text"] == HOSTILE


def test_what_it_warns_of(runs, report, tmp_path):
    code, said, err = report(runs, "--out", tmp_path / "a" / "r.html")
    assert code == 0
    assert "r.html" in said
    sentences = err.splitlines()

    def one(*words):
        found = [line for line in sentences if all(word in line for word in words)]
        assert len(found) == 1, (words, sentences)
        return found[0]

    assert "65.0 points above the full cache on the same 20 documents" in one("tova 128", "above the full")
    assert "4 arms were compared" in one("above the full")
    assert "in 20 of 20 samples a query saw at most 72 entries more" in one("tova 128", "entries more")
    assert "100% of the answers are cut off" in one("tova 128", "niah", "cut off")
    assert "2 commits" in one("ruler", "commits")
    assert one("ruler", "changes that no commit holds")
    assert one("Prompts of tiny are not shown")
    assert not [line for line in sentences if "h2o 64" in line]


def test_without_reason_there_is_no_warning(report, tmp_path):
    for policy, budget in (("full", None), ("h2o", "64")):
        write_run(tmp_path / "runs", answers(5), policy=policy, budget=budget)
    folder = word_tokenizer(tmp_path / "tokenizer", WORDS)
    out = tmp_path / "r.html"
    code, _, err = report(tmp_path / "runs", "--out", out, "--tokenizer", folder)
    assert (code, err) == (0, "")
    assert "None: no budgeted policy" in out.read_text()


@pytest.mark.parametrize("where", ["policy", "task", "model", "suite", "title"])
def test_names_are_escaped(report, tmp_path, where):
    what = {"policy": {"policy": HOSTILE}, "task": {"tasks": (HOSTILE,)}, "model": {"model": HOSTILE}}
    what |= {"suite": {"suite": HOSTILE}, "title": {}}
    lines = right(3, 5, task=HOSTILE if where == "task" else "niah")
    write_run(tmp_path / "runs", lines, **what[where])
    title = ("--title", HOSTILE) if where == "title" else ()
    report(tmp_path / "runs", "--out", tmp_path / "r.html", *title)
    text = (tmp_path / "r.html").read_text()
    assert "onerror" in text  # it is there, as words
    assert not re.findall(r"<img|<script>document", text)
    assert len(re.findall(r"<script>", text)) == 1
    Page(text)


def test_what_is_left_out_is_nowhere(report, tmp_path):
    write_run(tmp_path / "runs", right(5, 10, text="a secret answer"))
    code, _, _ = report(tmp_path / "runs", "--documents", 0, "--out", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert code == 0
    assert packs(text) == []
    assert "Prompts and answers were left out" in text
    report(tmp_path / "runs", "--documents", 3, "--out", tmp_path / "r.html")
    pack = packs((tmp_path / "r.html").read_text())[0]
    assert [document["doc"] for document in pack["docs"]] == [0, 4, 9]


def test_fifty_cells_of_long_texts_stay_small(report, tmp_path):
    letters = random.Random(0)
    texts = ["".join(letters.choices("abcdefghijklmnop ", k=6000)) for _ in range(200)]
    for cell in range(50):
        lines = [sample(doc, float(doc % 2), text=texts[(cell + doc) % 200] + str(cell)) for doc in range(30)]
        write_run(tmp_path / "runs", lines, policy=f"policy{cell % 10}", budget=str(64 * (1 + cell // 10)))
    code, _, err = report(tmp_path / "runs", "--out", tmp_path / "r.html")
    assert code == 0
    assert (tmp_path / "r.html").stat().st_size < 5_000_000
    pack = packs((tmp_path / "r.html").read_text())[0]
    assert [name for _, name in pack["arms"]][:3] == ["policy0 64", "policy0 128", "policy0 192"]
    begin, left_out, end = pack["docs"][0]["arms"]["0"]["text"]
    assert "letters are shown without their middle" in err
    whole = texts[0]
    assert whole.startswith(begin)
    assert len(begin) + left_out + len(end) >= 6001


def test_two_lengths_are_two_panels_and_two_versions_are_refused_in_place(report, tmp_path):
    for context in (512, 1024):
        for policy, budget in (("full", None), ("h2o", "64")):
            write_run(tmp_path / "runs", right(5, 10), policy=policy, budget=budget, context=context)
    code, _, err = report(tmp_path / "runs", "--out", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert code == 0
    assert "No plot" not in err
    assert "context 1024" in text
    assert len(packs(text)) == 2  # a document of another length is another document
    assert "<mark>1024</mark>" in text
    write_run(tmp_path / "runs", right(5, 10), policy="h2o", budget="64", weights="sha256:1")
    code, _, err = report(tmp_path / "runs", "--out", tmp_path / "r.html")
    assert code == 0
    assert "No plot of ruler on tiny" in err
    assert "weights is" in err


def test_a_prompt_that_cannot_be_shown_says_why(report, tmp_path):
    lines = [sample(doc, 1.0) | prompt(doc) | ({"prompt_ids": None} if doc else {}) for doc in range(2)]
    write_run(tmp_path / "runs", lines)
    folder = word_tokenizer(tmp_path / "tokenizer", WORDS)
    report(tmp_path / "runs", "--out", tmp_path / "r.html", "--tokenizer", folder)
    shown, missing = packs((tmp_path / "r.html").read_text())[0]["prompts"]
    assert shown[0].startswith("the needle")
    assert missing == ["", "", "The prompt was too long to be kept in the run."]
    report(tmp_path / "runs", "--out", tmp_path / "r.html")
    assert "tokenizer was not on the machine" in packs((tmp_path / "r.html").read_text())[0]["prompts"][0][2]


def test_a_torn_line_and_strange_letters(report, tmp_path):
    path = write_run(tmp_path / "runs", [sample(0, 1.0, text="\ud800 \u2028 \x00"), sample(1, 0.0)])
    with (path / run_folder.SAMPLES).open("a") as file:
        file.write('{"task": "ni')
    code, _, _ = report(tmp_path / "runs", "--out", tmp_path / "r.html")
    assert code == 0
    assert packs((tmp_path / "r.html").read_text())[0]["docs"][0]["arms"]["0"]["text"] == "\ud800 \u2028 \x00"


def test_bad_input_is_one_sentence(report, runs, trace, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    out = ("--out", tmp_path / "r.html")
    cases = {
        (tmp_path / "empty", *out): "There are no results",
        (tmp_path / "nowhere", *out): "There is no folder",
        (trace, *out): "is a trace",
        (runs, "--trace", tmp_path / "empty", *out): "is no trace",
        (runs, "--out", tmp_path / "empty"): "is a folder",
        (runs, "--out", tmp_path / "file" / "r.html"): "is a file",
        (runs, "--suite", "rulers", *out): "ruler",
        (runs, "--where", "question", *out): "column=value",
        (runs, "--documents", "-1", *out): "--documents",
        (runs, "--tokenizer", tmp_path / "empty", *out): "tokenizer.json",
    }
    for words, sentence in cases.items():
        code, said, err = report(*words)
        assert (code, said) == (2, ""), words
        assert sentence in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission_is_a_sentence(report, runs, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    code, _, err = report(runs, "--out", tmp_path / "locked" / "r.html")
    assert code == 2
    assert "no permission" in err


def test_filters_are_those_of_plots(report, runs, tmp_path):
    code, _, _ = report(runs, "--suite", "ruler", "--policy", "full,h2o", "--task", "vt", "--out", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert code == 0
    found = Page(text)
    policies = {attributes["data-policy"] for tag, attributes in found.elements if "data-policy" in attributes}
    tasks = {attributes["data-task"] for tag, attributes in found.elements if "data-task" in attributes}
    assert (policies, tasks) == ({"full", "h2o"}, {"vt"})
    assert "tova" not in "".join(found.text)


def test_it_says_what_it_waits_for_where_the_file_is_and_how_to_open_it(report, runs, tmp_path):
    out = tmp_path / "a page.html"
    code, said, _ = report(runs, "--suite", "ruler", "--documents", 0, "--out", out)
    assert code == 0
    written, following = said.splitlines()
    assert written.startswith(f"written to {out} (")
    assert following == f"next: open it in a browser: python -m webbrowser '{out}'"
    assert report(runs, "--suite", "ruler", "--documents", 0, "--out", out, "--quiet")[1] == ""
    waited = []
    build(ReportRequest(runs, out=out, filters=Filters(suite="ruler"), documents=0), waited.append)
    assert waited[0] == f"reading {runs}"
    assert "drawing the figures" in waited


def test_its_help_is_quick_and_has_an_example(tmp_path):
    program = (
        "import sys\nfrom evictbench.cli import app\n"
        "try:\n    app.main(['report', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'pandas', 'matplotlib', 'jinja2', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Example: evictbench report" in done.stdout


def test_it_imports_no_torch_and_leaves_nothing_half_written(runs, tmp_path):
    program = (
        "import sys\nfrom evictbench.cli import app\n"
        "try:\n    app.main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'lm_eval'} & sys.modules.keys()"
    )
    out = tmp_path / "r.html"
    done = subprocess.run(
        [sys.executable, "-c", program, "report", str(runs), "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["r.html"]
