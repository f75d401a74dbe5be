"""The published numbers: what is in the files, that they are read exactly, and the sentences about bad ones."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest

from evictbench.cli import app, listing
from evictbench.errors import UserError
from evictbench.registry import POLICIES, SUITES, load_suite, names, parse_policy
from evictbench.store import published as module
from evictbench.store.published import read_published, select
from evictbench.store.published_number import PROTOCOL, UNITS, Published

HELD = "snapkv:decode=reselect,votes=window"
"""SnapKV where a paper says that it selects again while it decodes."""

GOOD = """
paper: "1234.56789"
title: A paper
confidence: primary
trained: none
budget_meaning: entries of each KV head
protocol: {temperature: 0}
note: Once.

tables:
- source: Table 1
  model: org/model
  suite: ruler
  metric: score
  unit: percent
  columns:
    task: [niah_single_1, vt]
    protocol: [{context: 4096}, {context: 8192}]
  full: [80, 60.5]
  full_row: Dense
  rows:
  - {row: H2O, policy: h2o, budget: 256, value: [40, null], spread: [1.5, null], retention: [50, null], note: Twice.}
  - {row: TOVA, policy: tova, budget: 25%, value: [0, 30.25], protocol: {question: seen}}
"""


@pytest.fixture(scope="module")
def published():
    return read_published()


@pytest.fixture
def folder(tmp_path):
    def write(text, name="paper.yaml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path

    return write


def only(entries, **wanted):
    found = [entry for entry in entries if all(getattr(entry, name) == value for name, value in wanted.items())]
    assert len(found) == 1, found
    return found[0]


# What is in the files


def test_every_field_has_its_type_and_every_number_is_within_its_range(published):
    for entry in published:
        low, high = UNITS[entry.unit]
        assert low <= entry.value <= high
        assert type(entry.value) is float
        assert entry.spread is None or entry.spread >= 0
        assert entry.confidence in ("primary", "secondary", "plot")
        assert set(entry.protocol) <= set(PROTOCOL)
        assert (entry.budget is None) or entry.budget_meaning
        for name in ("paper", "title", "source", "model", "policy", "suite", "task", "metric"):
            assert getattr(entry, name).strip() == getattr(entry, name) != ""
        assert entry.note == "" or entry.note.endswith(".")


def test_no_two_numbers_are_the_same_one(published):
    assert len({entry.identity for entry in published}) == len(published)


def test_retention_can_be_computed_and_is_the_printed_one_within_rounding(published):
    """Numbers have as many decimals as their table: two for shares, one for percent; so a slip of a digit shows."""
    printed = 0
    for entry in published:
        if entry.full == 0:  # nothing to retain: LongChat counts no passage right, whatever it keeps
            assert (entry.paper, entry.task, entry.value) == ("2404.14469", "passage_count", 0)
        if entry.retention is None:
            continue
        printed += 1
        half, of_retention = {"share": (0.005, 0.5), "percent": (0.05, 0.05)}[entry.unit]
        least = 100 * (entry.value - half) / (entry.full + half)
        most = 100 * (entry.value + half) / (entry.full - half)
        assert least - of_retention <= entry.retention <= most + of_retention, entry
    assert printed >= 68  # KVpop's 24, DistillCache's 30 + 10 + 4


def test_the_full_cache_has_no_full_cache_beside_it(published):
    full = [entry for entry in published if entry.policy == "full"]
    assert full
    assert all(entry.full is None and entry.budget is None for entry in full)


def test_a_policy_of_ours_is_written_as_results_write_it(published):
    ours = set(names(POLICIES))
    labels = {entry.policy for entry in published}
    mine = {label for label in labels if label.partition(":")[0] in ours}
    for label in mine:
        assert parse_policy(label).label == label
    learned = {"dms", "kvpop", "kvpop_mlp", "indexmem_pp", "distillcache"}
    assert {label.partition(":")[0] for label in mine} == {"full", "streaming_llm", "tova", "h2o", "snapkv"} | learned
    assert {"ForesightKV", "RLKV"} <= labels


def test_a_task_of_a_suite_of_ours_is_one_that_it_has_or_is_said_by_the_paper(published):
    """LongBench's six groups and DistillCache's counts of errors and lengths are no tasks of ours."""
    of_papers = {"Single-Doc QA", "Multi-Doc QA", "Summarization", "Few-shot Learning", "Synthetic Tasks"}
    of_papers |= {"Code Completion", "errors", "length of answers"}
    suites = {name: set(load_suite(name).tasks) | {"mean"} for name in names(SUITES) if name != "fidelity"}
    seen = set()
    for entry in published:
        if entry.suite in suites:
            seen.add(entry.suite)
            assert entry.task in suites[entry.suite] or (entry.suite == "longbench" and entry.task in of_papers), entry
    assert seen == {"ruler", "longbench", "math500", "aime", "hmmt"}


def test_each_side_of_a_contradiction_differs_from_the_other(published):
    sides = {}
    for entry in published:
        if entry.contradiction:
            stated = entry.value if entry.retention is None else entry.retention
            sides.setdefault(entry.contradiction, set()).add(stated)
    assert len(sides) == 11
    assert all(len(values) > 1 for values in sides.values()), sides


@pytest.mark.parametrize(
    ("wanted", "value", "full"),
    [
        (
            {"paper": "2404.14469", "model": "mistralai/Mixtral-8x7B-Instruct-v0.1", "budget": "2048", "task": "lcc"},
            68.72,
            69.07,
        ),
        ({"paper": "2607.05061", "source": "main table, Qwen3-8B, row KVpop, B=2048", "task": "aime25"}, 0.44, 0.49),
        ({"paper": "2608.08878", "source": "Table 1, Reasoning, row RLKV", "budget": "12.5%"}, 38.9, 52.0),
        ({"paper": "2401.06104", "source": "Table 3, row TOVA-layer", "budget": "512"}, 7.41, 7.16),
        ({"paper": "2306.14048", "source": "Table 2, row H2O", "task": "piqa"}, 78.45, 78.51),
        ({"paper": "2309.17453", "source": "Table 1, row 4+1020"}, 5.40, None),
        (
            {
                "paper": "IndexMem++",
                "policy": "indexmem_pp",
                "suite": "ruler",
                "budget": "25%",
                "model": "Qwen/Qwen3-8B",
            },
            90.14,
            93.86,
        ),
        ({"paper": "2510.08525", "policy": "RLKV", "suite": "longreason"}, 15.0, 49.25),
        ({"paper": "2604.04921", "model": "openai/gpt-oss-20b", "policy": HELD, "task": "aime25"}, 36.7, 60.0),
    ],
)
def test_some_numbers_looked_up_by_hand(published, wanted, value, full):
    entry = only(published, **wanted)
    assert (entry.value, entry.full) == (value, full)


def test_snapkv_s_table_is_whole(published):
    table = [entry for entry in published if entry.paper == "2404.14469" and entry.source.startswith("Table 1,")]
    assert len(table) == 4 * 5 * 16
    assert {entry.task for entry in table} == {*load_suite("longbench").protocols["default"].tasks}


# How a file is read


def test_a_file_becomes_entries_and_the_closer_field_counts(folder):
    entries = read_published(folder(GOOD))
    assert [(entry.policy, entry.task, entry.value) for entry in entries] == [
        ("full", "niah_single_1", 80),
        ("full", "vt", 60.5),
        ("h2o", "niah_single_1", 40),
        ("tova", "niah_single_1", 0),
        ("tova", "vt", 30.25),
    ]
    dense, h2o, tova = entries[1], entries[2], entries[4]
    assert (dense.source, dense.budget, dense.full) == ("Table 1, row Dense", None, None)
    assert (h2o.source, h2o.budget, h2o.full, h2o.spread, h2o.retention) == ("Table 1, row H2O", "256", 80, 1.5, 50)
    assert (h2o.note, h2o.confidence, h2o.repeats, h2o.version) == ("Once. Twice.", "primary", None, "")
    assert h2o.protocol == {"temperature": 0, "context": 4096}
    assert (tova.budget, tova.full) == ("25%", 60.5)
    assert tova.protocol == {"temperature": 0, "context": 8192, "question": "seen"}


REQUIRED = ["paper", "title", "source", "model", "suite", "task", "metric", "unit", "confidence", "budget_meaning"]
REQUIRED += ["trained"]


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named_with_file_and_entry(folder, field):
    lines = [line for line in GOOD.splitlines() if not line.lstrip("- ").startswith(f"{field}:")]
    assert len(lines) == len(GOOD.splitlines()) - 1
    text = "\n".join(lines).replace("\n  model", "\n- model", 1) if field == "source" else "\n".join(lines)
    with pytest.raises(UserError, match=rf"paper\.yaml, line \d+, table 1.*the field {field} is missing\.$"):
        read_published(folder(text))


@pytest.mark.parametrize("field", ["policy", "budget", "value"])
def test_a_field_missing_from_a_row_is_named(folder, field):
    written = {"policy": "policy: h2o, ", "budget": "budget: 256, ", "value": "value: [40, null], "}[field]
    with pytest.raises(UserError, match=rf"\(Table 1\), row H2O: the field {field} is missing\.$"):
        read_published(folder(GOOD.replace(written, "")))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("budget: 256", "budget: 256, bugdet: 3", "the field bugdet is unknown"),
        ("unit: percent", "unit: percents", "'percents' is no unit; there are percent"),
        ("confidence: primary", "confidence: sure", "'sure' is no confidence"),
        ("trained: none", "trained: no", "False is no trained; there are none, scorer, model"),
        ("trained: none", "trained: {tova: none}", "the field trained does not name the policy h2o"),
        ("trained: none", "trained: none\nweighting: size", "'size' is no weighting; there are tasks, documents"),
        ("trained: none", "trained: none\nshare_of: prompt", "'prompt' is no share_of; there are text, length"),
        ("trained: none", "trained: none\nruns_as: [h2o]", "the field runs_as has to be a text, not ['h2o']"),
        ("trained: none", "trained: none\ntasks: vt", "the field tasks has to be a list of names, each once, not 'vt'"),
        ("trained: none", "trained: none\ntasks: [vt, vt]", "the field tasks has to be a list of names, each once"),
        ("temperature: 0", "temperature: [0, 1]", "temperature of the protocol has to be one value, not [0, 1]"),
        ("temperature: 0", "temprature: 0", "'temprature' is no protocol"),
        ("budget: 25%", "budget: 0%", "the field budget is '0%'"),
        ("budget: 25%", "budget: many", "the field budget is 'many'"),
        ("30.25]", "130.25]", "the field value is 130.25, which is no number of percent"),
        ("30.25]", "true]", "the field value is True"),
        ("30.25]", ".nan]", "the field value is nan"),
        ("30.25]", "'30']", "the field value is '30'"),
        ("30.25]", ".inf]", "the field value is inf"),
        ("spread: [1.5, null]", "spread: [.inf, null]", "the field spread is inf"),
        ("budget: 256,", "budget: 256, budget: 512,", "line 22: the key budget is given twice (first in line 22)."),
        ("note: Once.", "version: 2", "the field version has to be a text, not 2"),
        ("note: Once.", "contradiction: 3", "the field contradiction has to be a text, not 3"),
        ("[0, 30.25]", "[0]", "value has 1 items, and there are 2 columns"),
        ("[0, 30.25]", "30", "value has to be a list of 2 numbers"),
        ("task: [niah_single_1, vt]", "task: [niah_single_1]", "columns is a mapping of fields to lists"),
        ("model: org/model", "model: 7", "the field model has to be a text, not 7"),
        ("note: Once.", "repeats: 0", "the field repeats has to be a whole number above 0"),
        ("note: Once.", "contradiction: {a", "is not YAML that can be read"),
        ("  rows:", "  lines:", "line 11, table 1 (Table 1): the field rows is missing"),
        ("tables:", "table:", "the field tables is missing"),
        ("policy: tova, budget: 25%", "policy: h2o, budget: 256", None),
        ("row: TOVA, policy: tova, budget: 25%", "row: H2O, policy: h2o, budget: 256", "A number is there twice: 1234"),
        ("policy: tova,", "policy: tova, contradiction: [null, two],", "The contradiction two has one number only"),
    ],
)
def test_what_cannot_be_is_a_sentence(folder, old, new, sentence):
    text = GOOD.replace(", protocol: {question: seen}", "").replace(old, new)
    assert text != GOOD
    if sentence is None:  # another row of the paper may name the same policy and budget
        assert len(read_published(folder(text))) == 5
        return
    with pytest.raises(UserError) as error:
        read_published(folder(text))
    assert sentence in str(error.value)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("old", "new", "line", "entry"),
    [
        ("budget: 256,", "bugdet: 256,", 22, "row H2O"),  # the row's own
        ("task: [niah_single_1, vt]", "task: [niah_single_1, 7]", 17, "row Dense"),  # a column's, met first there
        ("  metric: score", "  metric: 7", 14, "row Dense"),  # the table's
        ("confidence: primary", "confidence: sure", 4, "row Dense"),  # the file's
        ("[0, 30.25]", "[0, 130]", 23, "row TOVA"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(folder, old, new, line, entry):
    text = GOOD.replace(old, new)
    assert text.splitlines()[line - 1] != GOOD.splitlines()[line - 1]
    with pytest.raises(UserError, match=rf"paper\.yaml, line {line}, table 1 \(Table 1\), {entry}: "):
        read_published(folder(text))


def test_a_field_may_differ_by_policy(folder):
    text = GOOD.replace("trained: none", "trained: {h2o: none, tova: scorer}\nruns_as: {tova: random}")
    entries = read_published(folder(text))
    assert {(entry.policy, entry.trained, entry.runs_as) for entry in entries} == {
        ("full", "none", ""),
        ("h2o", "none", ""),
        ("tova", "scorer", "random"),
    }


def test_an_empty_folder_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"it holds no \.yaml file\.$"):
        read_published(tmp_path)


# How they are chosen and shown


def test_a_policy_is_chosen_by_its_name_or_with_its_settings(published):
    assert {entry.policy for entry in select(published, policies=["kvpop"])} == {"kvpop"}
    snapkv = {entry.policy for entry in select(published, policies=["snapkv"])}
    assert {"snapkv", HELD} < snapkv
    one = select(published, policies=["snapkv:window=64,kernel=5,pool=avg"], suites=["ruler"])
    assert {entry.value for entry in one} == {78.74, 55.74, 36.73, 78.21, 62.81, 46.29}
    one = select(published, policies=["snapkv"], papers=["2406.02069"], suites=["longbench"])
    assert {entry.value for entry in one} == {41.35, 33.05}
    assert len(select(published)) == len(published)
    with pytest.raises(UserError, match=r"Unknown published policy 'kvpopp': did you mean kvpop"):
        select(published, policies=["kvpopp"])


def test_a_table_row_says_value_full_and_how_sure():
    rows = listing.published("h2o", "2608.08878", "longbench", whole=False)
    assert {"task": "longbench/mean at 8K", "value": "34.1 ± 1.1"}.items() <= rows[5].items()
    assert {"value": "36.4 ± 1.5", "full": "41.5", "unit": "percent", "sure": "primary"}.items() <= rows[1].items()
    assert any("contradicted" in row["sure"] for row in listing.published("kvpop", None, None, whole=False))


def test_the_command_prints_json_without_torch_and_exits_2_for_an_unknown_name(tmp_path):
    code = "import sys; from evictbench.cli.app import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"

    def call(*words):
        command = [sys.executable, "-c", code, "list", "published", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)

    done = call("--policy", "snapkv:window=16,kernel=5,RLKV", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["policy"] for row in rows} == {"snapkv:window=16,kernel=5", "RLKV"}
    assert set(rows[0]) == {field.name for field in fields(Published)} | {"runs"}
    assert rows[0]["runs"] == [] or "--policy snapkv" in rows[0]["runs"][0]
    failed = call("--paper", "2608.0887")
    assert failed.returncode == 2
    assert "Unknown published paper '2608.0887': did you mean 2608.08878" in failed.stderr


def test_what_no_run_can_match_is_listed_with_what_is_missing():
    rows = listing.unmatched("RLKV", "2608.08878", None, whole=False)
    assert len(rows) == 17 + 3 + 4 + 1 + 1  # scores; errors, times, perplexity and length of answers are none
    assert rows[0]["missing"] == "No policy here is RLKV."
    whole = listing.unmatched(None, "IndexMem++", "ruler", whole=True)
    assert set(whole[0]) == {field.name for field in fields(Published)} | {"missing"}
    assert "No policy here is query-dependent router." in {row["missing"] for row in whole}
    assert listing.reach(None, "IndexMem++", None) == (
        "A run here can match 4 of 34 scores and retentions under eviction, 16 of which are of policies that are here."
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--unmatched", "--policy", "kvpopp"], "Unknown published policy 'kvpopp': did you mean kvpop"),
        (["--unmatched", "--suite", "rular"], "Unknown published suite 'rular'"),
        (["--unmatched", "extra"], "unexpected extra argument"),
    ],
)
def test_a_wrong_filter_of_the_unmatched_ends_in_a_sentence(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        app.main(["list", "published", *words])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert said in err


def test_a_wrong_field_of_an_installed_file_ends_in_a_sentence_with_its_line(folder, monkeypatch, capsys):
    monkeypatch.setattr(module, "_installed", lambda: folder(GOOD.replace("budget: 25%", "bugdet: 25%")))
    with pytest.raises(SystemExit) as ended:
        app.main(["list", "published", "--unmatched"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert "paper.yaml, line 23, table 1 (Table 1), row TOVA: the field bugdet is unknown." in err
