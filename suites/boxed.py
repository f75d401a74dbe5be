"""Answers in a box: what asks for one, and how it is found again. For the suites whose answers are boxed."""

from __future__ import annotations

import re

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
"""What follows the problem, on a line of its own: as DeepSeek-R1's and Qwen's model cards ask for mathematics."""

_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<brace>[{}])", re.DOTALL)


def prompt(problem: str) -> str:
    """The user's turn for a problem; there is no system prompt."""
    return f"{problem.strip()}\n{INSTRUCTION}"


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} (or \fbox{...}) whose braces balance, stripped; None if there is none.

    A box that never closes is none, and neither is an empty one: it quotes the instruction. Of a box within a box
    the inner one counts. Escaped braces (\{ and \}) are text. One pass, however often a model repeats itself.
    """
    last: tuple[int, int] | None = None
    open_braces: list[int | None] = []  # where a box's content begins; None for any other brace
    for match in _BRACE.finditer(text):
        if match["box"]:
            open_braces.append(match.end())
        elif match["brace"] == "{":
            open_braces.append(None)
        elif match["brace"] == "}" and open_braces:
            start = open_braces.pop()
            filled = start is not None and not text[start : match.start()].isspace() and start < match.start()
            if start is not None and filled and (last is None or start > last[0]):
                last = (start, match.start())
    return text[slice(*last)].strip() if last else None
