"""The pages of the documentation: their code blocks, the command lines in them, their links and headings."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_ASSIGNED = re.compile(r"[A-Z_]+=.*")
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its first line, from 1. before: what the page says in the two lines above it."""

    page: Path
    line: int
    language: str
    text: str
    before: str


@dataclass(frozen=True)
class Command:
    """One command line. environment: what stands before it, such as RAY_ADDRESS=auto."""

    page: Path
    line: int
    environment: tuple[str, ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}: {shlex.join(self.words)}"


def blocks(page: Path, language: str | None = None) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        above = text[: match.start()]
        block = Block(
            page,
            above.count("\n") + 2,
            match["language"],
            match["text"],
            "\n".join(above.rstrip().splitlines()[-2:]),
        )
        if language in (None, block.language):
            found.append(block)
    return found


def commands(page: Path) -> list[Command]:
    """The lines of blocks without a language or of a shell's that are commands, and those of `evictbench` in YAML."""
    found = []
    for block in blocks(page):
        if block.language not in ("", "bash", "sh", "console", "yaml"):
            continue
        pending, start = "", 0
        for number, line in enumerate(block.text.splitlines(), start=block.line):
            start = start if pending else number
            pending += line.strip()
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            line, pending = pending, ""
            if block.language == "yaml":
                if re.match(r"(- run: )?evictbench [a-z]+ -", line):
                    found.append(_command(page, start, line.removeprefix("- run: ")))
            elif line and not is_output(block):
                found.append(_command(page, start, line))
    return found


def is_output(block: Block) -> bool:
    """Whether it shows what a command printed: indented from its first line on."""
    return block.text.startswith(" ")


def _command(page: Path, line: int, text: str) -> Command:
    words = shlex.split(text, comments=True)
    count = next((i for i, word in enumerate(words) if not _ASSIGNED.fullmatch(word)), len(words))
    return Command(page, line, tuple(words[:count]), tuple(words[count:]))


def links(page: Path) -> list[str]:
    return [match["target"] for match in _LINK.finditer(_without_blocks(page))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6}\s+(.+?)\s*$", _without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _without_blocks(page: Path) -> str:
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))
