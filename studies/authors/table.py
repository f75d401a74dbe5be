"""The table of differences from the authors' code: `python -m studies.authors.table [--check]`.

It makes docs/authors.md from the files studies/authors/differences/<policy>.yaml. With --check it writes nothing: the
exit code is 1 if the page is not what the files say. A file that is not as it should be is a sentence and exit code 2.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from evictbench import yaml_file
from evictbench.errors import UserError
from studies.command import exit_code, say

FOLDER = Path(__file__).parent / "differences"

ROOT = Path(__file__).parents[2]

DOCUMENT = ROOT / "docs/authors.md"

COMMIT = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{7,40}")
"""A repository of GitHub at a commit."""

OPENING = """# Our policies and the authors' code

Made by `python -m studies.authors.table` from `studies/authors/differences/`.

For every method whose authors published code, a script in `studies/authors/` ran that code at the commit named \
below, in an environment of its own, on tiny models and tensors that a seed makes. What it kept, its scores and its \
logits lie under `tests/authors/data/` as numbers, and tests hold our policies to them. Each row below is one \
comparison: what the authors do and what we do, how large the difference is, why it stays, and the test that holds it. \
Where there is no public code, the rows are the points that the paper leaves open, and what we chose.

A difference of logits is the largest absolute one on the tiny models of the tests, whose weights are float64. \
Authors' code that takes its softmax in float32 is left to do so; differences below 1e-5 are of that kind, and are \
called equal."""


@dataclass(frozen=True)
class Item:
    """A comparison. what: what the authors do and what we do. size: the difference as it was measured, with its unit.
    reason: why it stays. test: the test that holds it, a file or a pytest id. source: where the authors say or do so.
    """

    what: str
    size: str
    reason: str
    test: str | None
    source: str


@dataclass(frozen=True)
class Differences:
    """The comparisons of one policy.

    code: repositories with the commits that were run, none if there is no public code. licence: of each repository.
    command: what writes the numbers again, or where there is no code measures the sizes, if anything does.
    """

    policy: str
    code: tuple[str, ...]
    licence: tuple[str, ...]
    command: str | None
    items: tuple[Item, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.authors.table", description="Write docs/authors.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    return exit_code(_write, parser.parse_args(arguments))


def _write(options: argparse.Namespace) -> int:
    text = page(read_all(FOLDER))
    if not options.check:
        DOCUMENT.write_text(text, encoding="utf-8")
        return 0
    if DOCUMENT.is_file() and DOCUMENT.read_text(encoding="utf-8") == text:
        return 0
    say("docs/authors.md is not what studies/authors/differences says: run python -m studies.authors.table.")
    return 1


def read_all(folder: Path) -> list[Differences]:
    """The differences of every policy that has a file, by name. Raises UserError where a file is wrong."""
    return [read(path) for path in sorted(folder.glob("*.yaml"))]


def read(path: Path) -> Differences:
    """The differences of a policy from its file. Raises UserError that names the file and what is wrong with it."""
    content = _mapping(path, "the file", yaml_file.load(path), Differences)
    policy = _text(path, "policy", content["policy"])
    if policy != path.stem:
        raise UserError(f"{path}: policy is {policy}, and the file is named {path.name}.")
    if not (ROOT / "policies" / f"{policy}.py").is_file() and not (ROOT / "policies" / policy).is_dir():
        raise UserError(f"{path}: there is no policy {policy} in policies/.")
    code: tuple[str, ...] = ()
    licence: tuple[str, ...] = ()
    command = None if content["command"] is None else _text(path, "command", content["command"])
    if content["code"] != "none":
        code = _texts(path, "code", content["code"])
        licence = _texts(path, "licence", content["licence"])
        if wrong := next((name for name in code if not COMMIT.fullmatch(name)), None):
            raise UserError(f"{path}: code is none, or like owner/name@0123abc, not {wrong!r}.")
        if len(code) != len(licence):
            raise UserError(f"{path}: {len(code)} repositories and {len(licence)} licences.")
        if command is None:
            raise UserError(f"{path}: command says what runs the code.")
    elif content["licence"] not in (None, "none"):
        raise UserError(f"{path}: without code there is no licence.")
    if not isinstance(content["items"], list) or not content["items"]:
        raise UserError(f"{path}: items is a list of at least one comparison.")
    items = tuple(_item(path, f"item {number}", item) for number, item in enumerate(content["items"], 1))
    return Differences(policy, code, licence, command, items)


def _item(path: Path, where: str, content: Any) -> Item:
    content = _mapping(path, where, content, Item)
    test = None if content["test"] is None else _text(path, f"{where}: test", content["test"])
    if test is not None and not (ROOT / test.partition("::")[0]).is_file():
        raise UserError(f"{path}, {where}: there is no file {test.partition('::')[0]}.")
    what, size, reason, source = (
        _text(path, f"{where}: {name}", content[name]) for name in ("what", "size", "reason", "source")
    )
    return Item(what, size, reason, test, source)


def _mapping(path: Path, where: str, given: Any, kind: type) -> dict[str, Any]:
    """A mapping with exactly the fields of a class; `licence`, `command` and `test` may be left out."""
    names = [field.name for field in fields(kind)]
    if not isinstance(given, dict):
        raise UserError(f"{path}: {where} is a mapping with {', '.join(names)}.")
    content: dict[str, Any] = {name: None for name in names if name in ("licence", "command", "test")} | given
    if missing := [name for name in names if name not in content]:
        raise UserError(f"{path}: {where} lacks {', '.join(missing)}.")
    if unknown := [str(name) for name in content if name not in names]:
        raise UserError(f"{path}: {where} has {', '.join(unknown)}, and knows {', '.join(names)} alone.")
    return content


def _text(path: Path, where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{path}: {where} is a text, not {value!r}.")
    return " ".join(value.split())


def _texts(path: Path, where: str, value: Any) -> tuple[str, ...]:
    """One text, or a list of them."""
    return tuple(_text(path, where, each) for each in (value if isinstance(value, list) and value else [value]))


def page(policies: Sequence[Differences]) -> str:
    """The page as Markdown, a table for each policy."""
    return "\n".join([OPENING, *(line for policy in policies for line in _section(policy))]) + "\n"


def _section(differences: Differences) -> Iterator[str]:
    yield ""
    yield f"## {differences.policy}"
    yield ""
    if differences.code:
        codes = zip(differences.code, differences.licence, strict=True)
        named = ", ".join(f"{_code(code)} ({licence})" for code, licence in codes)
        yield f"Code: {named}. Again: `{differences.command}`."
    else:
        yield "No public code." + (f" The sizes: `{differences.command}`." if differences.command else "")
    yield ""
    yield "| authors and we | size | reason | held by | source |"
    yield "|---|---|---|---|---|"
    for item in differences.items:
        test = "-" if item.test is None else f"`{item.test.removeprefix('tests/')}`"
        cells = (item.what, item.size, item.reason, test, item.source)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(code: str) -> str:
    """A link to a repository at a commit."""
    repository, _, commit = code.partition("@")
    return f"[{repository}](https://github.com/{repository}/tree/{commit}) at `{commit[:12]}`"


if __name__ == "__main__":
    sys.exit(main())
