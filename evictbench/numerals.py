"""Numbers as they are written in options: ASCII digits alone, finite, and no larger than every library takes."""

from __future__ import annotations

import math
import re

from evictbench.errors import UserError

MOST = 2**31 - 1
"""The largest count: of tokens, cache entries, rows, steps, samples."""

MOST_SEED = 2**63 - 1
"""The largest seed: every generator takes it, and the one after it."""

_WHOLE = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read_whole(text: str, most: int = MOST) -> int:
    """A whole number from -most to most. Raises ValueError, whose message says what is taken ("a whole number").

    Only the digits 0 to 9 are read: no other script's, and no underscores between them.
    """
    text = text.strip()
    if not _WHOLE.fullmatch(text):
        raise ValueError("a whole number")
    if len(text.lstrip("+-0")) > len(str(most)) or abs(int(text.lstrip("+-0") or "0")) > most:
        raise ValueError(f"a whole number up to {most:,}")
    return int(text)


def read_real(text: str) -> float:
    """A finite number. Raises ValueError, whose message says what is taken ("a number")."""
    text = text.strip()
    if text.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        raise ValueError("a finite number")
    if not _REAL.fullmatch(text):
        raise ValueError("a number")
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number


def check_count(option: str, value: int | None, least: int = 1) -> None:
    """Raise UserError unless an option's count lies between `least` and `MOST`, or is None. option: its name."""
    if value is None:
        return
    if value < least:
        raise UserError(
            f"--{option} is {shown(value)}; it has to be {'0 or more' if least == 0 else f'at least {least}'}."
        )
    if value > MOST:
        raise UserError(f"--{option} is {shown(value)}; it has to be at most {MOST:,}.")


def check_seed(value: int) -> None:
    """Raise UserError unless a seed lies between 0 and `MOST_SEED`."""
    if value < 0:
        raise UserError(f"--seed is {shown(value)}; it has to be 0 or more.")
    if value > MOST_SEED:
        raise UserError(f"--seed is {shown(value)}; it has to be at most {MOST_SEED:,}.")


def shown(value: object, most: int = 60) -> str:
    """A number or text for a sentence: of one longer than `most` characters, its beginning."""
    if isinstance(value, int) and abs(value) > 10**60:
        return f"{'-' * (value < 0)}a number of {value.bit_length()} bits"
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 20]}… ({len(text)} characters)"
