"""The file of results, benchmarks/RESULTS.md: a section for each benchmark, written by the command that measures it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")

TITLE = "# Results\n\nEvery section is written by the command that stands in it, and replaced when that runs again.\n"


def machine() -> str:
    """Where a section was measured: processor, cores, memory, versions."""
    import torch

    from evictbench.models.machine import describe, versions

    at = describe(torch.device("cpu"))
    libraries = versions()
    return (
        f"{at['processor'] or 'unknown processor'} ({at['system']}), {at['cores']} cores, {at['threads']} threads, "
        f"{at['memory_bytes'] / 2**30:.0f} GiB; Python {libraries['python']}, torch {libraries['torch']}, "
        f"transformers {libraries['transformers']}"
    )


def replace_section(file: Path, heading: str, command: str, text: str) -> None:
    """Write the section of that heading: the command, the machine, the text. Another run's section of the same
    heading is replaced where it stands; a new one comes last. Lines of the text may not begin with "## "."""
    assert not re.search(r"^## ", text, flags=re.MULTILINE), "a section holds no other"
    section = f"## {heading}\n\n`{command}`\n\n{machine()}\n\n{text.strip()}\n"
    old = file.read_text(encoding="utf-8") if file.exists() else TITLE
    before, *sections = re.split(r"^(?=## )", old, flags=re.MULTILINE)
    at = next((index for index, one in enumerate(sections) if one.splitlines()[0] == f"## {heading}"), len(sections))
    sections[at : at + 1] = [section]
    file.parent.mkdir(parents=True, exist_ok=True)
    new = "\n".join(part.rstrip("\n") + "\n" for part in (before, *sections))
    beside = file.with_name(file.name + ".new")
    beside.write_text(new, encoding="utf-8")
    beside.replace(file)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def goal(value: float, sign: str, wanted: float) -> str:
    """A value beside its goal: "met", or by how much it is missed. sign: ">=" or "<="."""
    met = value >= wanted if sign == ">=" else value <= wanted
    return f"{sign} {wanted:.3g}: " + ("met" if met else f"missed by {abs(value - wanted) / wanted:.1%}")
