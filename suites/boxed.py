"""Boxed answers: the instruction that asks for one, how it is found in a text, and how thinking models sample it."""

from __future__ import annotations

import re

from evictbench.suite import Sampling

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
"""The line after the problem, as in DeepSeek-R1's and Qwen's model cards for mathematics."""

THINKING = Sampling(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0)
THINKING_SOURCE = "Qwen3's model card for thinking (temperature 0.6, top-p 0.95, top-k 20, min-p 0, 32,768 tokens)"
"""How the default protocols of AIME, HMMT and MATH-500 sample, and where that is from."""

INSTRUCT = {"qwen3-*-instruct-2507*": Sampling(temperature=0.7, top_p=0.8, top_k=20, min_p=0.0)}
KVPOP_SAMPLING = (
    "its sampling is not known to us, so that of the models' cards: Qwen3's for thinking, and for "
    "Qwen3-4B-Instruct-2507 temperature 0.7, top-p 0.8, top-k 20, min-p 0"
)
"""How KVpop's protocols sample models that do not think, by their names, and where that is from."""

_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<brace>[{}])", re.DOTALL)


def prompt(problem: str) -> str:
    """The user's turn for a problem; there is no system prompt."""
    return f"{problem.strip()}\n{INSTRUCTION}"


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...} whose braces balance, stripped; None if there is none.

    A box that never closes does not count, nor does an empty one, which quotes the instruction. Of a box within a box
    the inner one counts. Escaped braces (\{ and \}) are text. The time is linear in the text's length.
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
            if start is not None and (last is None or start > last[0]) and text[start : match.start()].strip():
                last = (start, match.start())
    return text[slice(*last)].strip() if last else None
