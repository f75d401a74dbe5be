"""The budget: how many cache entries per KV head a decode query may see, itself included."""

from __future__ import annotations

import re
from dataclasses import dataclass

from evictbench.errors import UserError
from evictbench.numerals import MOST, shown

LEAST_FROM_SHARE = 32
"""A share of a short text never gives fewer entries than this."""

PARTS = 1_000_000
"""Shares are whole millionths, so that 29% of 100 is 29 and not 28.999…"""

EXAMPLES = "give a number of entries such as 256, or a share of the text such as 25%"


@dataclass(frozen=True)
class Budget:
    """Entries per KV head that a decode query can see, everything counted; exactly one field is set.

    tokens: an absolute number of entries, at least 1.
    share: a fraction of the text, in (0, 1].
    """

    tokens: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.share is None):
            raise ValueError("a budget is either a number of tokens or a share")
        if self.tokens is not None and self.tokens < 1:
            raise UserError(f"A budget of {self.tokens} keeps nothing: {EXAMPLES}.")
        if self.share is not None and not 0 < self.share <= 1:
            raise UserError(f"A budget of {_percent(self.share)} is not above 0% and up to 100%: {EXAMPLES}.")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read "256" or "25%". Raises UserError for anything else."""
        text = text.strip()
        number = re.fullmatch(r"([+-]?)([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(%?)", text)
        if number is None:
            raise UserError(f"The budget {shown(text)!r} is not a number: {EXAMPLES}.")
        sign, digits, percent = number.groups()
        if sign == "-":
            raise UserError(f"The budget {shown(text)} is negative: {EXAMPLES}.")
        if float(digits) == 0:
            raise UserError(f"A budget of {shown(text)} keeps nothing: {EXAMPLES}.")
        if percent:
            if float(digits) > 100:
                raise UserError(f"The budget {shown(text)} is over 100%: {EXAMPLES}.")
            millionths = round(float(digits) / 100 * PARTS)
            if millionths == 0:
                raise UserError(f"The budget {shown(text)} is too small a share to mean anything: {EXAMPLES}.")
            return cls(share=millionths / PARTS)
        if "." in digits:
            raise UserError(f"The budget {shown(text)} is not a whole number of entries: {EXAMPLES}.")
        if float(digits) > MOST:
            raise UserError(
                f"The budget {shown(text)} is more than {MOST:,} entries, and no text is as long: {EXAMPLES}."
            )
        return cls(tokens=int(digits))

    def at(self, prompt: int, seen: int) -> int:
        """The entries allowed for a prompt of `prompt` tokens (its context, if the question is unseen) once `seen`
        tokens have been seen in all: the number itself, or ⌊share · max(prompt, seen)⌋, at least 32."""
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return max(LEAST_FROM_SHARE, round(self.share * PARTS) * max(prompt, seen) // PARTS)

    def __str__(self) -> str:
        return str(self.tokens) if self.tokens is not None else _percent(self.share or 0.0)


def _percent(share: float) -> str:
    return f"{share * 100:.6f}".rstrip("0").rstrip(".") + "%"
