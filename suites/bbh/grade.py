r"""Grading: the answer after the last "the answer is", or in the first line, is compared by its kind: an option, a
truth value, a number, brackets, or words. No letter of it is cut off, whether a full stop follows or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..marked import affirmed, marked
from ..typesetting import LONGEST
from ..wording import COMPARED

_OPTION = re.compile(r"\([A-Z]\)")
_TRUTHS = ("true", "false", "yes", "no", "valid", "invalid")
_TRUTH = re.compile(rf"[\s(]*({'|'.join(_TRUTHS)})\b", re.IGNORECASE)
_OTHER_TRUTH = re.compile(rf"[\s),]*(?:/|\bor\b|\band\b)\s*(?:{'|'.join(_TRUTHS)})\b", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+")
_BRACKETS = re.compile(r"[\[\](){}<>\s]+")

_NAMED_OPTION = re.compile(r"\(([A-Za-z])\)")
_LEADING_OPTION = re.compile(r"(?:(?:option|choice|statement)\s+)?(?:\(([A-Z])\)|([A-Z])(?=[).:]|\Z))", re.IGNORECASE)
_MORE_OPTIONS = re.compile(
    r"\)?\s*(?:(?:[,;/&]|and|or)[\s,;/&]*(?:(?:and|or)[\s,;/&]*)?(?:option\s+)?\(?[A-Za-z]\b\)|\([A-Za-z]\)|"
    r"(?:[/&]|and\b|or\b)\s*(?-i:[A-HJ-Z])\W*\Z)",
    re.IGNORECASE,
)
_OTHER_OPTION = re.compile(
    r"(?:(?!\b(?:because|since|as|while|whereas|if)\b)[^()]){0,60}\b(?:or|wait|actually|sorry)\b[^()]{0,20}\(([A-Z])\)",
    re.IGNORECASE,
)
_NOT = (
    r"(?:n['’]t|\b(?:not|never|neither|nor|cannot|unlike|excluding|rather\s+than|instead\s+of|other\s+than|"
    r"except(?:\s+for)?|none\s+of|(?:all|anything|everything|nothing)\s+but))\b"
)
_NOT_OPTIONS = re.compile(
    rf"{_NOT}(?:(?!\bbut\b|\bit\s+is\b)[^()]){{0,60}}\([A-Z]\)(?:[\s,/&]*(?:(?:and|or|nor)[\s,]*)?\([A-Z]\))*",
    re.IGNORECASE,
)
_NOT_NUMBER = re.compile(rf"{_NOT}\s+(?:(?!but\b)[a-z]+\s+){{0,2}}-?\d+(?:\.\d+)?", re.IGNORECASE)
# In small letters: "(B) isn't right" denies, "(B) Isn't it fun?" is the text of an option.
_DENIED = re.compile(
    r"\s*(?:cannot\b|(?:is|are|was|were|can|could|would|must|should|does|seems)\s*(?:n['’]t\b|(?:[a-z]+\s+)?"
    r"(?:not|wrong|incorrect|impossible|ruled\s+out|eliminated|excluded)\b))",
)

_ANY_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?!\w)(?!\.\d)")
_LEADING_MINUS = re.compile(r"\s*-\s*\(?\s*(?=\d)")
_MORE_NUMBERS = re.compile(r"\s*(?:,|or|and|to|[-+*/^×÷]|\\times|\\cdot|\\div)\s*\(?-?\d")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{(.*)\}")
_FRAME = re.compile(r"\$|\*\*|\\\(|\\\)|\\\[|\\\]|`")


def chain_of_thought(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float | str]:
    """lm-eval `process_results` of the prompt with worked examples. Without a marker there is no answer."""
    return _graded(doc["target"], next(marked(results[0]), None))


def direct(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float | str]:
    """lm-eval `process_results` of the direct prompt: the answer after a marker, else the first line with text."""
    line = next((line for line in results[0].splitlines() if line.strip()), "")
    return _graded(doc["target"], next(marked(results[0]), affirmed(line)))


def _graded(target: str, answer: str | None) -> dict[str, float | str]:
    spelling = canonical(answer, target) if answer is not None else None
    return {"score": float(spelling is not None and spelling == canonical(target, target)), "answer": spelling or ""}


def canonical(answer: str, target: str) -> str | None:
    """An answer in one spelling, read as the same kind of answer as `target`; None where it is of another kind.

    (B), B, B) and "(b) text of the option" are (B). Several options or numbers are None, and so is what is only
    denied: "(B) is wrong", "not (A)". "(B), not (A)" is (B). A truth value has to come first: "No, ..." is no, and
    "not valid" is None. A number may follow an equals sign and precede its unit. LONGEST characters are read.
    """
    text = _unwrapped(answer)
    if _OPTION.fullmatch(target):
        return _option(text)
    if target.strip().lower() in _TRUTHS:
        return _truth(text)
    if _NUMBER.fullmatch(target):
        return _number(text)
    if _BRACKETS.fullmatch(target):
        brackets = "".join(text.split()).strip("\"'.")
        return brackets if brackets and _BRACKETS.fullmatch(brackets) else None
    words = (word.strip("\"'“”‘’.,;[]") for word in re.split(r"[\s,;]+", text.lower().replace("’", "'")))
    return " ".join(word for word in words if word) or None


def _unwrapped(answer: str) -> str:
    text = _FRAME.sub("", answer[:LONGEST])
    while (inner := _WRAPPED.sub(r"\1", text)) != text:
        text = inner
    return text.strip().strip("\"'“”").strip()


def _truth(text: str) -> str | None:
    match = _TRUTH.match(text)
    if match is None or _OTHER_TRUTH.match(text, match.end()) or _DENIED.match(text, match.end()):
        return None
    return match[1].lower()


def _option(text: str) -> str | None:
    leading = _LEADING_OPTION.match(text)
    if leading is None:
        letters = {letter.upper() for letter in _NAMED_OPTION.findall(_NOT_OPTIONS.sub("", text))}
        return f"({letters.pop()})" if len(letters) == 1 and not _denied_at_the_end(text) else None
    letter, rest = (leading[1] or leading[2]).upper(), _NOT_OPTIONS.sub("", text[leading.end() :])
    other = _OTHER_OPTION.match(rest)
    if _MORE_OPTIONS.match(rest) or _DENIED.match(rest.lstrip(")")) or (other and other[1].upper() != letter):
        return None
    return f"({letter})"


def _denied_at_the_end(text: str) -> bool:
    """Whether the last option that is named is said to be wrong: "I think (B) is wrong"."""
    named = list(_NAMED_OPTION.finditer(text))
    return bool(named and _DENIED.match(text, named[-1].end()))


def _number(text: str) -> str | None:
    text = _NOT_NUMBER.sub("", _THOUSANDS.sub("", text.replace("−", "-"))).rpartition("=")[2]
    text = _LEADING_MINUS.sub("-", text, count=1) if _LEADING_MINUS.match(text) else text
    match = _ANY_NUMBER.search(text)
    if match is None or _MORE_NUMBERS.match(text, match.end()) or COMPARED.search(text):
        return None
    whole, _, fraction = match[0].partition(".")
    digits = whole.lstrip("-").lstrip("0")
    return None if fraction.strip("0") else f"-{digits}" if digits and whole[0] == "-" else digits or "0"
