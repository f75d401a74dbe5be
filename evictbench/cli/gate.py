"""`evictbench gate`: ask, show what was found, write the files; say where they are and what to type next."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.gate.ask import findings
from evictbench.gate.finding import Finding, Request
from evictbench.gate.tolerances import EXACT_IDS, EXACT_KL
from evictbench.terminal.console import console_for, describe, say
from evictbench.terminal.waiting import Waiting

if TYPE_CHECKING:
    from evictbench.gate.finding import Finding


def gate_and_show(request: Request, as_json: bool = False, quiet: bool = False) -> int:
    """Ask, show what was found (quiet: the verdict and what fails), write the files; the exit code."""
    _check(request)
    with Waiting(console_for(stderr=True, quiet=quiet)) as waiting:
        found = findings(request, waiting.begin)
    words = console_for(stderr=as_json, quiet=quiet)
    describe(words, "gate", _rows(request))
    shown = json_of if as_json else in_short if quiet else as_table
    print(shown(found))
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    for file, form, append in (
        (request.junit, as_junit, False),
        (request.markdown, as_markdown, False),
        (Path(summary) if summary else None, as_markdown, True),
    ):
        if file is not None:
            _write(file, form(found), append)
            say(words, f"{'added' if append else 'written'} to {file}")
    say(words, f"next: {shlex.join(_next(request, found))}")
    return int(any(finding.fails for finding in found))


def _rows(request: Request) -> list[tuple[str, Sequence[str]]]:
    """What was asked, defaults spelled out."""
    points, share = f"{100 * request.tolerance:g} points", f"{100 * request.latency_tolerance:g}%"
    fails = []
    if request.exact:
        fails.append(f"a KL that differs by more than {EXACT_KL:g} nats, less than {EXACT_IDS:.0%} of equal answers")
    elif request.baseline is not None:
        fails.append(f"a drop in score of more than {points}, a decode step that takes over {share} more")
    if request.published:
        fails.append(f"retention more than {points} below a paper's")
    against = [] if request.baseline is None else [str(request.baseline)]
    return [
        ("runs", [" ".join([str(request.folder), *request.filters.options()])]),
        ("against", [*against, *(["the numbers of papers"] if request.published else [])]),
        ("samples", ["those that both have" if request.paired else "all"]),
        ("fails on", fails),
    ]


def _next(request: Request, found: Sequence[Finding]) -> list[str]:
    """How to look closer at what fails first, or at all of it: at the steps of a trace, at samples of a suite."""
    from evictbench.gate.latency import LATENCY, traces_in

    failing = [finding for finding in found if finding.fails] or list(found)
    if all(finding.quantity == LATENCY for finding in failing):
        traces = request.traces or traces_in(request.folder)
        return ["evictbench", "plot", str(traces[0])]
    suites = {finding.suite.partition(", ")[0] for finding in failing if finding.quantity != LATENCY}
    return ["evictbench", "report", str(request.folder), "--suite", ",".join(sorted(suites))]


def _check(request: Request) -> None:
    """What can be known before anything is read."""
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
    filters = request.filters
    if request.published and (filters.model or filters.task or filters.where):
        raise UserError("--model, --task and --where do not go with --published: name the folder of these runs.")
    if not 0 <= request.tolerance < 1:
        raise UserError(f"--tolerance is a drop in score from 0 to 1 (0.02 is two points), not {request.tolerance:g}.")
    if not request.latency_tolerance >= 0:
        raise UserError(f"--latency-tolerance is a share from 0 up (0.1 is 10%), not {request.latency_tolerance:g}.")
    for file in filter(None, (request.junit, request.markdown)):
        if file.is_dir():
            raise UserError(f"{file} is a folder, and what is written is a file.")
        parent = next(folder for folder in file.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(f"{file} cannot be written: {parent} is a file, or gives no permission.")


def _write(file: Path, text: str, append: bool = False) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a" if append else "w", encoding="utf-8") as out:
            out.write(text if text.endswith("\n") else text + "\n")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}.") from error


COLUMNS = ("", "cell", "suite", "task", "what", "here", "there", "difference", "95%", "p", "n", "finds")
LEFT = 5
"""Columns that are words; the others are numbers."""

LEGEND = "finds: the drop that a gate of these documents would have found in 80 of 100 cases."

MARKS = {"failed": "❌", "below": "❌", "warning": "⚠️", "passed": "✅", "reproduced": "✅"}
OTHER_MARK = "➖"

QUIET = ("passed", "reproduced")
"""Verdicts that need no sentence in a table."""

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_table(found: Sequence[Finding]) -> str:
    """A table, and below it the sentences of all that is not simply passed."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for number, heading in enumerate(COLUMNS):
        table.add_column(heading, justify="left" if number < LEFT else "right", no_wrap=True)
    for finding in found:
        table.add_row(*(escape(cell) for cell in (finding.status, *_cells(finding))))
    console = Console(width=max(40, Console(width=10_000).measure(table).maximum), color_system=None)
    with console.capture() as capture:
        console.print(table)
    said = [f"{one.status}: {_named(one)}: {one.why}" for one in found if one.status not in QUIET]
    lines = [line.rstrip() for line in capture.get().strip("\n").rstrip().splitlines()]
    legend = [LEGEND] if any(one.finds is not None for one in found) else []
    notes = ["", *legend, *said] if legend or said else []
    return "\n".join([*lines, *notes, "", verdict(found)])


def in_short(found: Sequence[Finding]) -> str:
    """The sentences of what fails, and the verdict."""
    return "\n".join([*(f"{one.status}: {_named(one)}: {one.why}" for one in found if one.fails), verdict(found)])


def as_markdown(found: Sequence[Finding]) -> str:
    """A heading with the verdict, the sentences that matter, and the table."""
    lines = [f"### evictbench gate: {verdict(found)}", ""]
    said = [one for one in found if one.status not in QUIET]
    lines += [f"- {_mark(one)} **{_plain(_named(one))}** {one.status}: {_plain(one.why)}" for one in said]
    lines += ["", f"| {' | '.join(COLUMNS)} |"] if said else [f"| {' | '.join(COLUMNS)} |"]
    lines.append("|" + "|".join("---" if number < LEFT else "---:" for number in range(len(COLUMNS))) + "|")
    for one in found:
        lines.append(f"| {' | '.join(map(_plain, (f'{_mark(one)} {one.status}', *_cells(one))))} |")
    if any(one.finds is not None for one in found):
        lines += ["", LEGEND]
    return "\n".join([*lines, ""])


def json_of(found: Sequence[Finding]) -> str:
    """`passed`, and every finding with its numbers in their own units."""
    import json

    whole = {"passed": not any(one.fails for one in found), "findings": [asdict(one) for one in found]}
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False)


def as_junit(found: Sequence[Finding]) -> str:
    """JUnit's XML: a suite for each suite, a case for each finding; what fails is a failure, what could not be
    compared is skipped, and a warning stands in the case's output."""
    from xml.etree import ElementTree

    root = ElementTree.Element("testsuites", _counts(found), name="evictbench gate")
    for name in dict.fromkeys(one.suite for one in found):
        group = [one for one in found if one.suite == name]
        suite = ElementTree.SubElement(root, "testsuite", _counts(group), name=_clean(name))
        for one in group:
            names = {"classname": _clean(f"{one.suite}.{one.task}"), "name": _clean(f"{one.cell} {one.quantity}")}
            case = ElementTree.SubElement(suite, "testcase", names, time="0")
            if one.fails:
                failure = ElementTree.SubElement(case, "failure", message=_clean(one.why), type=one.status)
                failure.text = _clean(_in_words(one))
            elif one.status in ("not comparable", "too few samples"):
                ElementTree.SubElement(case, "skipped", message=_clean(one.why))
            else:
                ElementTree.SubElement(case, "system-out").text = _clean(f"{one.status}: {one.why} {_in_words(one)}")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False).join(
        ('<?xml version="1.0" encoding="utf-8"?>\n', "\n")
    )


def verdict(found: Sequence[Finding]) -> str:
    """ "Failed: 2 of 14 (12 passed, 2 failed)." """
    counts = Counter(one.status for one in found)
    fails = sum(one.fails for one in found)
    parts = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{f'failed, {fails} of {len(found)}' if fails else 'passed'} ({parts})"


def _counts(found: Sequence[Finding]) -> dict[str, str]:
    skipped = sum(one.status in ("not comparable", "too few samples") and not one.fails for one in found)
    failures = sum(one.fails for one in found)
    counts = {"tests": len(found), "failures": failures, "errors": 0, "skipped": skipped, "time": 0}
    return {name: str(count) for name, count in counts.items()}


def _named(one: Finding) -> str:
    return f"{one.cell} on {one.suite}, {one.task}, {one.quantity}"


def _mark(one: Finding) -> str:
    return "❌" if one.fails else MARKS.get(one.status, OTHER_MARK)


def _cells(one: Finding) -> Iterable[str]:
    """What a table shows of a finding after its status."""
    numbers = (_said(one.quantity, one.here), _said(one.quantity, one.there), _said(one.quantity, one.difference, True))
    interval = ""
    if one.low is not None and one.high is not None:
        interval = f"{_said(one.quantity, one.low, True)} to {_said(one.quantity, one.high, True)}"
    p = "" if one.p is None else f"{one.p:.2g}"
    return (
        one.cell,
        one.suite,
        one.task,
        one.quantity,
        *numbers,
        interval,
        p,
        str(one.samples),
        _said(one.quantity, one.finds),
    )


def _in_words(one: Finding) -> str:
    """The numbers of a finding in a line."""
    cells = zip(COLUMNS[LEFT:], tuple(_cells(one))[LEFT - 1 :], strict=True)
    return ", ".join(f"{name} {text}" for name, text in cells if text)


def _said(quantity: str, value: float | None, signed: bool = False) -> str:
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


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, inside a table too."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text).replace("\n", " ")


def _clean(text: str) -> str:
    """Text without what XML cannot hold."""
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)
