"""The file of results, benchmarks/RESULTS.md: a section for each benchmark, written by the command that measures it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")

TITLE = "# Results\n\nEvery section is written by the command that stands in it, and replaced when that runs again.\n"


def machine() -> str:
    """The machine on which a section was measured: processor, cores, memory, versions."""
    import torch

    from evictbench.models.machine import hardware, versions

    parts = hardware(torch.device("cpu"))
    libraries = versions()
    return (
        f"{parts['processor'] or 'unknown processor'} ({parts['system']}), {parts['cores']} cores, "
        f"{parts['threads']} threads, {parts['memory_bytes'] / 2**30:.0f} GiB; Python {libraries['python']}, "
        f"torch {libraries['torch']}, transformers {libraries['transformers']}"
    )


def replace_section(file: Path, heading: str, command: str, text: str) -> None:
    """Write the section of that heading: the command, the machine, the text.

    A section of an earlier run is replaced where it stands; a new heading comes last. Lines of the text may not begin
    with "## ".
    """
    assert not re.search(r"^## ", text, flags=re.MULTILINE), "a section holds no other"
    section = f"## {heading}\n\n`{command}`\n\n{machine()}\n\n{text.strip()}\n"
    old = file.read_text(encoding="utf-8") if file.exists() else TITLE
    before, *sections = re.split(r"^(?=## )", old, flags=re.MULTILINE)
    headings = [old_section.splitlines()[0] for old_section in sections]
    place = headings.index(f"## {heading}") if f"## {heading}" in headings else len(sections)
    sections[place : place + 1] = [section]
    file.parent.mkdir(parents=True, exist_ok=True)
    new = "\n".join(part.rstrip("\n") + "\n" for part in (before, *sections))
    unfinished = file.with_name(file.name + ".new")
    unfinished.write_text(new, encoding="utf-8")
    unfinished.replace(file)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def goal(value: float, sign: str, wanted: float) -> str:
    """A value beside its goal: "met", or by how much it is missed. sign: ">=" or "<="."""
    met = value >= wanted if sign == ">=" else value <= wanted
    return f"{sign} {wanted:.3g}: " + ("met" if met else f"missed by {abs(value - wanted) / wanted:.1%}")
