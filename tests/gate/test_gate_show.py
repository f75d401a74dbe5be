"""The table, JSON, JUnit's XML, Markdown and GitHub's step summary."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from gate.gate_cases import right, steps, write_run, write_trace

from evictbench.cli.gate import as_junit, as_markdown, as_table, github_annotations, json_of, verdict
from evictbench.errors import UserError
from evictbench.gate.ask import findings
from evictbench.gate.finding import Finding, GateRequest


def finding(status, fails=False, **changes):
    numbers = {"here": 0.4, "there": 0.7, "difference": -0.3, "low": -0.4, "high": -0.2, "p": 0.001, "samples": 100}
    words = {"cell": "h2o @ 64", "suite": "ruler", "task": "niah", "quantity": "score", "why": "It has dropped."}
    return Finding(status=status, fails=fails, **numbers | words | changes)


FOUND = [
    finding("passed", finds=0.123),
    finding("failed", fails=True, cell="h2o:group=<max> @ 64", why="It | has <dropped> & [red]'far'[/] \x00\ud800."),
    finding("warning", quantity="above full", suite="gsm8k"),
    finding("not comparable", here=None, there=None, difference=None, low=None, high=None, p=None),
    finding("too few samples"),
    finding("below", fails=True, quantity="retention"),
    finding("passed", quantity="bytes", here=2.5e6, there=2e6, difference=0.5e6, low=None, high=None),
]


def test_the_table_has_a_row_for_each_and_a_sentence_for_what_is_not_passed():
    text = as_table(FOUND, whole=True)
    assert text.count("It has dropped.") == 4
    assert "[red]'far'[/]" in text
    assert "-30.0" in text
    assert "2.5 MB" in text
    assert "12.3" in text
    assert text.endswith("failed, 2 of 7 (2 passed, 1 failed, 1 warning, 1 not comparable, 1 too few samples, 1 below)")
    assert verdict([finding("passed")]) == "passed (1 passed)"


def test_what_fails_stands_first_and_what_passed_is_counted():
    many = [*[finding("passed", cell=f"tova @ {number}") for number in range(84)], *FOUND]
    lines = as_table(many).splitlines()
    rows = [line.split()[0] for line in lines[2:7]]
    assert rows == ["failed", "below", "warning", "not", "too"]
    assert "tova" not in "\n".join(lines)
    assert "86 passed and are not listed: --all lists them." in lines
    whole = as_table(many, whole=True).splitlines()
    assert sum(line.split()[:1] == ["passed"] for line in whole) == 86
    assert [line.split()[0] for line in whole[2:4]] == ["failed", "below"]
    assert as_table([finding("passed")]) == ("1 passed and is not listed: --all lists it.\n\npassed (1 passed)")


def test_each_row_that_fails_is_an_annotation_on_github_that_no_name_can_break(gate, folders, monkeypatch):
    lines = github_annotations([*FOUND, finding("failed", fails=True, cell="a,b::c\n::warning::d")], Path("runs, 100%"))
    assert len(lines) == 3
    assert lines[1].startswith(
        "::error file=runs%2C 100%25,title=h2o @ 64 on ruler%2C niah%2C retention::It has dropped."
    )
    assert lines[2].startswith("::error file=runs%2C 100%25,title=a%2Cb%3A%3Ac%0A%3A%3Awarning%3A%3Ad on ruler")
    assert not any("\n" in line for line in lines)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    _, out, err = gate(*folders, "--json")
    assert json.loads(out)["passed"] is False
    (line,) = [line for line in err.splitlines() if line.startswith("::error")]
    assert line.startswith(f"::error file={folders[0]},title=h2o @ 64 on ruler%2C niah%2C score::The score has dropped")


def test_json_has_every_field():
    whole = json.loads(json_of([finding("passed"), finding("warning")]))
    assert whole["passed"] is True
    assert whole["findings"][0] == vars(finding("passed"))


def test_junit_is_as_its_readers_expect():
    root = ElementTree.fromstring(as_junit(FOUND).encode())
    assert root.tag == "testsuites"
    assert {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "7",
        "failures": "2",
        "errors": "0",
        "skipped": "2",
    }
    suites = root.findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["ruler", "gsm8k"]
    for suite in suites:
        cases = suite.findall("testcase")
        assert int(suite.get("tests")) == len(cases) == len(list(suite))
        assert int(suite.get("failures")) == len(suite.findall("testcase/failure"))
        assert int(suite.get("skipped")) == len(suite.findall("testcase/skipped"))
        for case in cases:
            assert case.get("classname")
            assert case.get("name")
            assert float(case.get("time")) == 0
            assert {child.tag for child in case} <= {"failure", "skipped", "system-out"}
    failure = root.find(".//failure")
    assert failure.get("message") == "It | has <dropped> & [red]'far'[/] \N{REPLACEMENT CHARACTER}" * 1 + (
        "\N{REPLACEMENT CHARACTER}."
    )
    assert failure.get("type") == "failed"
    assert "here 40.0, there 70.0, difference -30.0, 95% -40.0 to -20.0, p 0.001, n 100" in failure.text
    assert as_junit(FOUND).startswith("<?xml version=")


def test_markdown_is_a_table_that_no_name_can_break():
    lines = as_markdown(FOUND).splitlines()
    assert lines[0].startswith("### evictbench gate: failed, 2 of 7")
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 2 + len(FOUND)
    assert "<details><summary>2 passed</summary>" in lines
    assert [line.split()[2] for line in table[2:4]] == ["failed", "below"]
    for line in table:
        assert line.replace("\\|", "").count("|") == 13
    assert "h2o:group=\\<max\\> @ 64" in "\n".join(table)
    assert any(line.startswith("- ❌") and "has \\<dropped\\>" in line for line in lines)


@pytest.fixture
def folders(tmp_path):
    for side, count in (("here", 40), ("there", 70)):
        write_run(tmp_path / side, right(count, 100))
    return tmp_path / "here", "--baseline", tmp_path / "there"


def test_files_are_written_and_a_failure_is_too(gate, folders, tmp_path):
    junit, markdown = tmp_path / "new" / "gate.xml", tmp_path / "gate.md"
    code, out, _ = gate(*folders, "--junit", junit, "--markdown", markdown)
    assert code == 1
    assert "failed: h2o @ 64 on ruler, niah, score: The score has dropped by 30.0 points" in out
    assert ElementTree.parse(junit).getroot().get("failures") == "1"
    assert markdown.read_text().startswith("### evictbench gate: failed, 1 of 3")
    assert out.splitlines()[-3:] == [
        f"written to {junit}",
        f"written to {markdown}",
        f"next: evictbench report {folders[0]} --suite ruler",
    ]


def test_it_says_what_it_asks_with_its_defaults(gate, folders):
    _, out, _ = gate(*folders, "--policy", "h2o")
    assert out.splitlines()[:5] == [
        "gate:",
        f"  runs      {folders[0]} --policy h2o",
        f"  against   {folders[2]}",
        "  samples   all",
        "  fails on  a drop in score of more than 2 points, a decode step that takes over 10% more",
    ]


def test_quiet_and_json_keep_stdout_to_the_verdict(gate, folders, tmp_path):
    code, out, err = gate(*folders, "--quiet", "--junit", tmp_path / "gate.xml")
    assert (code, err) == (1, "")
    assert [line.partition(":")[0].partition(",")[0] for line in out.splitlines()] == ["failed", "failed"]
    _, out, err = gate(*folders, "--json", "--junit", tmp_path / "gate.xml")
    assert json.loads(out)["passed"] is False
    assert f"written to {tmp_path / 'gate.xml'}" in err
    assert gate(*folders, "--json", "--quiet")[2] == ""


def test_of_traces_alone_the_next_command_is_about_them(gate, tmp_path):
    for side in ("here", "there"):
        write_trace(tmp_path / side / "t", steps())
    code, out, _ = gate(tmp_path / "here", "--baseline", tmp_path / "there")
    assert code == 0
    assert out.splitlines()[-1] == f"next: evictbench plot {tmp_path / 'here' / 't'}"


@pytest.mark.parametrize("words", [("--baseline", "there"), ("--baseline", "there", "--exact"), ("--published",)])
def test_it_says_what_it_waits_for(tmp_path, monkeypatch, words):
    for side in ("here", "there"):
        write_run(tmp_path / side, right(4, 10))
    monkeypatch.chdir(tmp_path)
    request = GateRequest(Path("here"), published=words[0] == "--published", exact="--exact" in words)
    request = replace(request, baseline=None if request.published else Path("there"))
    said = []
    with suppress(UserError):  # no paper speaks of these runs
        findings(request, said.append)
    assert said[0] == "reading the runs in here"
    assert said[-1].startswith("comparing them with")


def test_the_step_summary_is_added_to(gate, folders, tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    gate(*folders)
    text = summary.read_text()
    assert text.startswith("before\n### evictbench gate: failed")


def test_help_names_every_option(gate):
    code, out, _ = gate("--help")
    assert code == 0
    for option in ("--published", "--baseline", "--exact", "--tolerance", "--latency-tolerance", "--junit", "--json"):
        assert option in out
