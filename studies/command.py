"""What the commands of the studies share: errors as sentences, progress on stderr, and parts of the work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from evictbench.errors import UserError

Item = TypeVar("Item")


def exit_code(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command; returns its exit code, or 2 after a UserError, whose sentence goes to stderr."""
    try:
        return command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def say(text: str) -> None:
    """Write a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def part(text: str) -> tuple[int, int]:
    """The value of --part: "1/2" is the first of two parts."""
    number, _, total = text.partition("/")
    if not (number.isdigit() and total.isdigit() and 1 <= int(number) <= int(total)):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1/2")
    return int(number), int(total)


def in_part(items: Sequence[Item], part: tuple[int, int]) -> Sequence[Item]:
    """The items of a part: every `total`-th, from the part's number on."""
    number, total = part
    return items[number - 1 :: total]
