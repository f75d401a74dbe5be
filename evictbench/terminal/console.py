"""Consoles to write to, lines on them, and the noise of libraries kept out of both."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""

WIDE = 100
"""Letters of a description's line from which on its parts get lines of their own."""


def console_for(stderr: bool, quiet: bool = False) -> Console:
    """A console that keeps tables whole where it does not write to a terminal; quiet: one that writes nothing."""
    from rich.console import Console

    console = Console(stderr=stderr, quiet=quiet)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=stderr, width=PIPE_WIDTH, quiet=quiet)
    return console


def loud(console: Console) -> Console:
    """The console for warnings, which a quiet one would not write."""
    return console_for(stderr=True) if console.quiet else console


def say(console: Console, text: str) -> None:
    """Write a line as it is: its brackets are no markup, its numbers get no colours, and it is not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def describe(console: Console, what: str, rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Write what is about to be done: a heading and its texts a row, those without a text left out."""
    say(console, f"{what}:")
    width = 1 + max(len(heading) for heading, _ in rows)
    for heading, texts in rows:
        said = [text for text in texts if text]
        together = "; ".join(said)
        lines = said if len(together) > WIDE else [together] * bool(said)
        for number, line in enumerate(lines):
            say(console, f"  {'' if number else heading:<{width}} {line}")


def command() -> str:
    """The command as it was given, to be typed again."""
    return shlex.join(["evictbench", *sys.argv[1:]])


def quieten() -> None:
    """Keep what libraries say about themselves out of the output; --debug lets it through."""
    if "--debug" in sys.argv:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    warnings.filterwarnings("ignore")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
