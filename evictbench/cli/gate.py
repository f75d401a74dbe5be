"""`evictbench gate`: print the findings, write the files, and say where they are and what to type next."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from evictbench.errors import UserError
from evictbench.gate import ask
from evictbench.gate.finding import Finding, GateRequest
from evictbench.gate.tolerances import EXACT_IDS, EXACT_KL
from evictbench.gate.wanted import JOINT
from evictbench.store.files import check_file, saving, write_text
from evictbench.terminal.console import console_for, describe, say
from evictbench.terminal.markdown import markdown_text
from evictbench.terminal.waiting import Waiting

COLUMNS = ("", "cell", "suite", "task", "what", "here", "there", "difference", "95%", "p", "n", "finds")

LEFT = 5
"""Columns that are words; the others are numbers."""

LEGEND = "finds: the drop that a gate of these documents would have found in 80 of 100 cases."

MARKS = {"failed": "❌", "below": "❌", "warning": "⚠️", "passed": "✅", "reproduced": "✅"}

OTHER_MARK = "➖"

QUIET = ("passed", "reproduced")
"""Verdicts that need no sentence in a table."""

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def gate_and_show(request: GateRequest, as_json: bool = False, quiet: bool = False, whole: bool = False) -> int:
    """Print the findings, write the files, and return the exit code.

    as_json: print the findings as JSON. quiet: print only the verdict and what fails. whole: list in the table what
    passed too.
    """
    _check(request)
    with Waiting(console_for(stderr=True, quiet=quiet)) as waiting:
        findings = ask.findings(request, waiting.begin)
    console = console_for(stderr=as_json, quiet=quiet)
    describe(console, "gate", _rows(request))
    shown = json_of if as_json else in_short if quiet else partial(as_table, whole=whole)
    print(shown(findings))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_annotations(findings, request.folder):
            print(line, file=sys.stderr)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    for file, form, append in (
        (request.junit, as_junit, False),
        (request.markdown, as_markdown, False),
        (Path(summary) if summary else None, as_markdown, True),
    ):
        if file is not None:
            _write(file, form(findings), append)
            say(console, f"{'added' if append else 'written'} to {file}")
    say(console, f"next: {shlex.join(_next(request, findings))}")
    return int(any(finding.fails for finding in findings))


def as_table(findings: Sequence[Finding], whole: bool = False) -> str:
    """A table, what fails first, and below it the sentences of all that is not simply passed. whole: with the rows that
    passed; without it a line counts them."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shown, passed = _in_order(findings)
    rows = [*shown, *passed] if whole else shown
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for number, heading in enumerate(COLUMNS):
        table.add_column(heading, justify="left" if number < LEFT else "right", no_wrap=True)
    for finding in rows:
        table.add_row(*(escape(cell) for cell in (finding.status, *_cells(finding))))
    console = Console(width=max(40, Console(width=10_000).measure(table).maximum), color_system=None)
    with console.capture() as capture:
        console.print(table)
    notable = [
        f"{finding.status}: {_named(finding)}: {finding.why}" for finding in shown if finding.status not in QUIET
    ]
    lines = [line.rstrip() for line in capture.get().strip("\n").rstrip().splitlines()] if table.row_count else []
    lines += ["", _left_out(passed)] if passed and not whole else []
    legend = [LEGEND] if table.row_count and any(finding.finds is not None for finding in rows) else []
    notes = ["", *legend, *notable] if legend or notable else []
    return "\n".join([*lines, *notes, "", verdict(findings)]).lstrip("\n")


def in_short(findings: Sequence[Finding]) -> str:
    """The sentences of what fails, and the verdict."""
    return "\n".join(
        [
            *(f"{finding.status}: {_named(finding)}: {finding.why}" for finding in findings if finding.fails),
            verdict(findings),
        ]
    )


def as_markdown(findings: Sequence[Finding]) -> str:
    """A heading with the verdict, the sentences that matter, and tables: what fails first, and what passed folded."""
    shown, passed = _in_order(findings)
    lines = [f"### evictbench gate: {verdict(findings)}", ""]
    lines += [
        f"- {_mark(finding)} **{markdown_text(_named(finding))}** {finding.status}: {markdown_text(finding.why)}"
        for finding in shown
        if finding.status not in QUIET
    ]
    if shown:
        lines += [*([""] if lines[-1] else []), *_markdown_table(shown)]
    if passed:
        lines += [
            "",
            f"<details><summary>{len(passed)} passed</summary>",
            "",
            *_markdown_table(passed),
            "",
            "</details>",
        ]
    if any(finding.finds is not None for finding in findings):
        lines += ["", LEGEND]
    return "\n".join([*lines, ""])


def github_annotations(findings: Sequence[Finding], folder: Path) -> list[str]:
    """A workflow command of GitHub for each finding that fails: an error beside the change, named by cell and row, at
    the folder of runs."""
    place = _property(str(folder))
    lines = []
    for finding in findings:
        if finding.fails:
            said = _data(f"{finding.why} {_in_words(finding)}")
            lines.append(f"::error file={place},title={_property(_named(finding))}::{said}")
    return lines


def json_of(findings: Sequence[Finding]) -> str:
    """`passed`, and every finding with its numbers in their own units."""
    import json

    whole = {
        "passed": not any(finding.fails for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False)


def as_junit(findings: Sequence[Finding]) -> str:
    """JUnit's XML: a suite for each suite, a case for each finding; what fails is a failure, what could not be
    compared is skipped, and a warning stands in the case's output."""
    from xml.etree import ElementTree

    root = ElementTree.Element("testsuites", _counts(findings), name="evictbench gate")
    for name in dict.fromkeys(finding.suite for finding in findings):
        group = [finding for finding in findings if finding.suite == name]
        suite = ElementTree.SubElement(root, "testsuite", _counts(group), name=_clean(name))
        for finding in group:
            names = {
                "classname": _clean(f"{finding.suite}.{finding.task}"),
                "name": _clean(f"{finding.cell} {finding.quantity}"),
            }
            case = ElementTree.SubElement(suite, "testcase", names, time="0")
            if finding.fails:
                failure = ElementTree.SubElement(case, "failure", message=_clean(finding.why), type=finding.status)
                failure.text = _clean(_in_words(finding))
            elif finding.status in ("not comparable", "too few samples"):
                ElementTree.SubElement(case, "skipped", message=_clean(finding.why))
            else:
                ElementTree.SubElement(case, "system-out").text = _clean(
                    f"{finding.status}: {finding.why} {_in_words(finding)}"
                )
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False).join(
        ('<?xml version="1.0" encoding="utf-8"?>\n', "\n")
    )


def verdict(findings: Sequence[Finding]) -> str:
    """ "Failed: 2 of 14 (12 passed, 2 failed)." """
    counts = Counter(finding.status for finding in findings)
    fails = sum(finding.fails for finding in findings)
    parts = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{f'failed, {fails} of {len(findings)}' if fails else 'passed'} ({parts})"


def _rows(request: GateRequest) -> list[tuple[str, Sequence[str]]]:
    """The rows that describe the request, defaults included."""
    points, share = f"{100 * request.tolerance:g} points", f"{100 * request.latency_tolerance:g}%"
    fails = []
    if request.exact:
        fails.append(f"a KL that differs by more than {EXACT_KL:g} nats, less than {EXACT_IDS:.0%} of equal findings")
    elif request.baseline is not None:
        fails.append(f"a drop in score of more than {points}, a decode step that takes over {share} more")
    if request.published:
        fails.append(f"retention more than {points} below a paper's")
    against = [] if request.baseline is None else [str(request.baseline)]
    trainings = ["the mean of runs that differ in trained weights alone"] if request.trainings else []
    return [
        ("runs", [" ".join([str(request.folder), *request.filters.options()])]),
        ("against", [*against, *(["the numbers of papers"] if request.published else [])]),
        ("samples", ["those that both have" if request.paired else "all", *trainings]),
        ("fails on", fails),
    ]


def _next(request: GateRequest, findings: Sequence[Finding]) -> list[str]:
    """The command that shows more of what fails, or of all findings: the steps of a trace, or samples of suites."""
    from evictbench.gate.latency import LATENCY, traces_in

    failing = [finding for finding in findings if finding.fails] or list(findings)
    if all(finding.quantity == LATENCY for finding in failing):
        traces = request.traces or traces_in(request.folder)
        return ["evictbench", "plot", str(traces[0])]
    named = {finding.suite.partition(", ")[0] for finding in failing if finding.quantity != LATENCY}
    suites = {suite for name in named for suite in name.split(JOINT)}
    return ["evictbench", "report", str(request.folder), "--suite", ",".join(sorted(suites))]


def _check(request: GateRequest) -> None:
    """Raise UserError for options that cannot work, before anything is read."""
    if not request.folder.is_dir():
        raise UserError(f"There is no folder {request.folder}.")
    if request.baseline is None:
        for option, given in {
            "--exact": request.exact,
            "--paired": request.paired,
            "--trace": request.traces,
            "--baseline-trace": request.baseline_traces,
        }.items():
            if given:
                raise UserError(f"{option} is about a baseline: name one with --baseline.")
        if not request.published:
            raise UserError("A gate holds runs against something: --published, or --baseline FOLDER.")
    if request.base and not request.published:
        raise UserError("--base names the model that papers measured: it is about --published.")
    if request.exact and request.trainings:
        raise UserError("--trainings takes the mean of several runs, and --exact compares single ones: leave one out.")
    filters = request.filters
    if request.published and (filters.model or filters.task or filters.where):
        raise UserError("--model, --task and --where do not go with --published: name the folder of these runs.")
    if not 0 <= request.tolerance < 1:
        raise UserError(f"--tolerance is a drop in score from 0 to 1 (0.02 is two points), not {request.tolerance:g}.")
    if not request.latency_tolerance >= 0:
        raise UserError(f"--latency-tolerance is a share from 0 up (0.1 is 10%), not {request.latency_tolerance:g}.")
    for file, subject in ((request.junit, "JUnit's XML"), (request.markdown, "Markdown")):
        if file is not None:
            check_file(file, subject)


def _write(file: Path, text: str, append: bool = False) -> None:
    if append:
        with saving(file), file.open("a", encoding="utf-8", errors="replace") as out:
            out.write(text)
    else:
        write_text(file, text)


def _in_order(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """What is always shown, what fails first; and what passed."""
    shown = [finding for finding in findings if finding.fails or finding.status != "passed"]
    passed = [finding for finding in findings if not finding.fails and finding.status == "passed"]
    return sorted(shown, key=lambda finding: (not finding.fails, finding.status in QUIET)), passed


def _left_out(passed: Sequence[Finding]) -> str:
    are, them = ("is", "it") if len(passed) == 1 else ("are", "them")
    return f"{len(passed)} passed and {are} not listed: --all lists {them}."


def _markdown_table(findings: Sequence[Finding]) -> list[str]:
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "|" + "|".join("---" if number < LEFT else "---:" for number in range(len(COLUMNS))) + "|",
    ]
    for finding in findings:
        cells = (f"{_mark(finding)} {finding.status}", *_cells(finding))
        lines.append(f"| {' | '.join(map(markdown_text, cells))} |")
    return lines


def _data(text: str) -> str:
    """Text as a workflow command of GitHub takes it."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """A value before the "::" of a workflow command."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _counts(findings: Sequence[Finding]) -> dict[str, str]:
    skipped = sum(finding.status in ("not comparable", "too few samples") and not finding.fails for finding in findings)
    failures = sum(finding.fails for finding in findings)
    counts = {"tests": len(findings), "failures": failures, "errors": 0, "skipped": skipped, "time": 0}
    return {name: str(count) for name, count in counts.items()}


def _named(finding: Finding) -> str:
    return f"{_cell(finding)} on {finding.suite}, {finding.task}, {finding.quantity}"


def _cell(finding: Finding) -> str:
    """ "h2o @ 256", "dms @ 256 (saw 155, a head at most 301)"."""
    return finding.cell if finding.seen is None else f"{finding.cell} ({finding.seen})"


def _mark(finding: Finding) -> str:
    return "❌" if finding.fails else MARKS.get(finding.status, OTHER_MARK)


def _cells(finding: Finding) -> Iterable[str]:
    """The cells of a finding in a table, after its status."""
    numbers = (
        _number(finding.quantity, finding.here),
        _number(finding.quantity, finding.there),
        _number(finding.quantity, finding.difference, True),
    )
    interval = ""
    if finding.low is not None and finding.high is not None:
        interval = f"{_number(finding.quantity, finding.low, True)} to {_number(finding.quantity, finding.high, True)}"
    p = "" if finding.p is None else f"{finding.p:.2g}"
    return (
        _cell(finding),
        finding.suite,
        finding.task,
        finding.quantity,
        *numbers,
        interval,
        p,
        str(finding.samples),
        _number(finding.quantity, finding.finds),
    )


def _in_words(finding: Finding) -> str:
    """The numbers of a finding in a line."""
    cells = zip(COLUMNS[LEFT:], tuple(_cells(finding))[LEFT - 1 :], strict=True)
    return ", ".join(f"{name} {text}" for name, text in cells if text)


def _number(quantity: str, value: float | None, signed: bool = False) -> str:
    """A number in the unit in which it is read: scores and shares in per cent, sizes in MB, the rest as they are."""
    from evictbench.terminal.units import human_bytes

    if value is None:
        return ""
    sign = "" if not signed else "+" if value > 0 else "-" if value < 0 else ""
    size = abs(value) if signed else value
    if quantity == "bytes":
        return sign + human_bytes(size)
    if quantity in ("score", "above full", "ids", "retention"):
        return f"{sign}{100 * size:.1f}%" if quantity in ("ids", "retention") else f"{sign}{100 * size:.1f}"
    return f"{sign}{size:.4g}"


def _clean(text: str) -> str:
    """Text without what XML cannot hold."""
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)
