"""Consoles, lines on them, and the noise of libraries kept out."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""

WIDE = 100
"""Characters beyond which the parts of a description's line get lines of their own."""


def console_for(stderr: bool, quiet: bool = False) -> Console:
    """A console on stdout or stderr that keeps tables whole where it does not write to a terminal.

    quiet: a console that writes nothing.
    """
    from rich.console import Console

    console = Console(stderr=stderr, quiet=quiet)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=stderr, width=PIPE_WIDTH, quiet=quiet)
    vars(console)["on_broken_pipe"] = _broken_pipe  # rich's own ends the process without a word
    return console


def _broken_pipe() -> NoReturn:
    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def output_consoles(as_json: bool, quiet: bool) -> tuple[Console, Console]:
    """A console for a command's tables and one for its hints. With JSON on stdout both write to stderr; `quiet` drops
    the hints, and the tables too where there is JSON in their place."""
    return console_for(stderr=as_json, quiet=quiet and as_json), console_for(stderr=as_json, quiet=quiet)


def warn(console: Console, sentence: str) -> None:
    """Write a warning; instead of to a quiet console, to stderr."""
    from rich.markup import escape

    target = console_for(stderr=True) if console.quiet else console
    target.print(f"[yellow]warning:[/] {escape(sentence)}", highlight=False, soft_wrap=True)


def say(console: Console, text: str) -> None:
    """Write a line as it is: no markup, no colours for numbers, no line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def describe(console: Console, title: str, rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Write what is about to be done: a heading and its texts in each row. Rows without a text are left out."""
    say(console, f"{title}:")
    width = 1 + max(len(heading) for heading, _ in rows)
    for heading, texts in rows:
        parts = [text for text in texts if text]
        whole = "; ".join(parts)
        lines = parts if len(whole) > WIDE else [whole] * bool(parts)
        for number, line in enumerate(lines):
            say(console, f"  {'' if number else heading:<{width}} {line}")


def command() -> str:
    """The command line of this process, to be typed again."""
    return shlex.join(["evictbench", *sys.argv[1:]])


def silence_libraries() -> None:
    """Keep the libraries' own messages and warnings out of the output, unless --debug is given."""
    if "--debug" in sys.argv:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    warnings.filterwarnings("ignore")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
