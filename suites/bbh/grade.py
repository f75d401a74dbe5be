r"""Grading: the answer after the last "the answer is", or in the first line, is compared by its kind: an option, a
truth value, a number, brackets, or words. No letter of it is cut off, whether a full stop follows or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..marked import marked

_OPTION = re.compile(r"\([A-Z]\)")
_TRUTHS = ("true", "false", "yes", "no", "valid", "invalid")
_TRUTH = re.compile(rf"({'|'.join(_TRUTHS)})\b", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+")
_BRACKETS = re.compile(r"[\[\](){}<>\s]+")

_NAMED_OPTION = re.compile(r"\(([A-Za-z])\)")
_LEADING_OPTION = re.compile(r"(?:(?:option|choice|statement)\s+)?(?:\(([A-Z])\)|([A-Z])(?=[).:]|\Z))", re.IGNORECASE)
_MORE_OPTIONS = re.compile(r"\)?\s*(?:,|/|&|and|or)\s*(?:option\s+)?\(?[A-Za-z]\b\)", re.IGNORECASE)
_ANY_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?!\w)(?!\.\d)")
_MORE_NUMBERS = re.compile(r"\s*(?:,|or|and|to)\s*-?\d")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{(.*)\}")
_FRAME = re.compile(r"\$|\*\*|\\\(|\\\)|\\\[|\\\]|`")


def chain_of_thought(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float | str]:
    """lm-eval `process_results` of the prompt with worked examples. Without a marker there is no answer."""
    return _graded(doc["target"], next(marked(results[0]), None))


def direct(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float | str]:
    """lm-eval `process_results` of the direct prompt: the answer after a marker, else the first line with text."""
    line = next((line for line in results[0].splitlines() if line.strip()), "")
    return _graded(doc["target"], next(marked(results[0]), line))


def _graded(target: str, answer: str | None) -> dict[str, float | str]:
    spelling = canonical(answer, target) if answer is not None else None
    return {"score": float(spelling is not None and spelling == canonical(target, target)), "answer": spelling or ""}


def canonical(answer: str, target: str) -> str | None:
    """An answer in one spelling, read as the same kind of answer as `target`; None where it is of another kind.

    (B), B, B) and "(b) text of the option" are (B); several options or several numbers are None. A truth value has to
    come first: "No, ..." is no, and "not valid" is None. A number may follow an equals sign and precede its unit.
    """
    text = _unwrapped(answer)
    if _OPTION.fullmatch(target):
        return _option(text)
    if target.strip().lower() in _TRUTHS:
        truth = _TRUTH.match(text)
        return truth[1].lower() if truth else None
    if _NUMBER.fullmatch(target):
        return _number(text)
    if _BRACKETS.fullmatch(target):
        brackets = "".join(text.split()).strip("\"'.")
        return brackets if brackets and _BRACKETS.fullmatch(brackets) else None
    words = (word.strip("\"'“”‘’.,;[]") for word in re.split(r"[\s,;]+", text.lower().replace("’", "'")))
    return " ".join(word for word in words if word) or None


def _unwrapped(answer: str) -> str:
    text = _FRAME.sub("", answer)
    while (inner := _WRAPPED.sub(r"\1", text)) != text:
        text = inner
    return text.strip().strip("\"'“”").strip()


def _option(text: str) -> str | None:
    leading = _LEADING_OPTION.match(text)
    if leading and not _MORE_OPTIONS.match(text, leading.end()):
        return f"({(leading[1] or leading[2]).upper()})"
    letters = {letter.upper() for letter in _NAMED_OPTION.findall(text)}
    return f"({letters.pop()})" if len(letters) == 1 and not leading else None


def _number(text: str) -> str | None:
    text = _THOUSANDS.sub("", text.replace("−", "-")).rpartition("=")[2]
    match = _ANY_NUMBER.search(text)
    if match is None or _MORE_NUMBERS.match(text, match.end()):
        return None
    whole, _, fraction = match[0].partition(".")
    digits = whole.lstrip("-").lstrip("0")
    return None if fraction.strip("0") else f"-{digits}" if digits and whole[0] == "-" else digits or "0"
