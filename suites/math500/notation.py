r"""MATH's answers in one notation, before they are compared, and what can be told apart by notation alone.

`NOTATION` is what we add to math-verify, rule by rule; the rest is its own.
"""

from __future__ import annotations

import re
import unicodedata

from ..typesetting import RULES, Rule, bare, rule
from ..wording import ANNOUNCED, HEDGES

_SYMBOLS = {
    "π": r"\pi ",
    "θ": r"\theta ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "×": r"\times ",
    "÷": r"\div ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∶": ":",
}
_MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def _power(match: re.Match[str]) -> str:
    return "^{" + unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-") + "}"


def _vulgar_fraction(match: re.Match[str]) -> str:
    over, _, under = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return rf"\frac{{{over}}}{{{under}}}"


def _magnitude(match: re.Match[str]) -> str:
    return rf"\times 10^{{{_MAGNITUDES[match['word'].lower()]}}}" + (r"\text{" if match["text"] else "")


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match["whole"], match["fixed"], match["braced"] or match["digit"]
    over = int(f"{whole}{fixed}{period}") - int(f"0{whole}{fixed}")
    return rf"\frac{{{over}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


NOTATION: tuple[Rule, ...] = (
    rule("|".join(_SYMBOLS), lambda match: _SYMBOLS[match[0]], "symbols of Unicode"),
    rule("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", _power, "x²"),
    rule("[¼½¾⅐-⅞]", _vulgar_fraction, "½"),
    rule(r"√\s*\(([^()]*)\)", r"\\sqrt{\1}", "√(2)"),
    rule(r"√\s*\{", r"\\sqrt{", "√{2}"),
    rule(r"√\s*(\d+(?:\.\d+)?|[A-Za-z])", r"\\sqrt{\1}", "√2"),
    rule(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", r"\sqrt(2)"),
    rule(r"\\log_\s*(?:\{\s*e\s*\}|e(?![A-Za-z]))", r"\\ln", r"\log_e 2"),
    rule(r"(?<=[\w)}])\s*\*\*\s*(\d+)", r"^{\1}", "x**12"),
    rule(
        r"(?<=\S)\s*\\approx\s*-?[\d.,]+(?:\.\.\.|\\[lc]?dots)?$",
        "",
        r"\frac{1}{3} \approx 0.333",
    ),
    rule(r"(?<=\d)\s*\\text\s*\{\s*to\s*\}\s*(?=\d)", ":", r"2 \text{ to } 3, a ratio"),
    rule(r"\\colon(?![A-Za-z])", ":", r"2 \colon 5"),
    rule(r"\\[lr]brace(?![A-Za-z])", lambda match: r"\{" if match[0][1] == "l" else r"\}", r"\lbrace 1 \rbrace"),
    rule(r"\\(?:varnothing|O)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset", "the empty set"),
    rule(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])|°", "", "degrees are a unit"),
    rule(r"(?<=[\d})])\s*\\?%", "", "percent is a unit, as in MATH's own script: 10\\% is 10 and not 0.1"),
    rule(r"(?<=[\d})])\s*(?:\\text\s*\{\s*)?\bper\s?cent\b\s*\}?", "", "10 percent"),
    rule(
        rf"(?<=[\d}}])\s*(?P<text>\\text\s*\{{\s*)?\b(?P<word>{'|'.join(_MAGNITUDES)})\b",
        _magnitude,
        r"42\text{ million}",
    ),
    rule(
        r"(?P<whole>\d*)\.(?P<fixed>\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(?P<braced>\d+)\s*\}|(?P<digit>\d))",
        _repeating,
        r"0.\overline{3}",
    ),
    rule(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.,]*\d)", lambda match: match[0].replace(" ", ""), "61 400"),
    rule(r"(?:^|=)\s*-?\d{1,3}(?:,\d{3})+(?![\d,]|\s*,)", lambda match: match[0].replace(",", ""), "61,400"),
    rule(r"^(-?\d+)\s+(\d+)\s*/\s*(\d+)$", r"\1\\frac{\2}{\3}", "137 1/2"),
    rule(
        r"(?<=[\d)])\s*\(?\s*(?:\\text\s*\{\s*)?\(?\s*base[\s-]*\}?\s*(\d+)\s*\)?\s*\}?\s*\)?$",
        r"_{\1}",
        r"204 \text{ (base 5)}",
    ),
    rule(r"\\text\s*\{\s*(?:an?|the)\s+", r"\\text{", r"\text{an ellipse}"),
    Rule(ANNOUNCED, lambda match: match[1] or "", "the answer is 7"),
)

_TEXT_ONLY: tuple[Rule, ...] = (
    rule(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", r"\dfrac"),
    rule(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", r"\frac12"),
    rule(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])", "", r"\left("),
    rule(r"\\(?:text|mathrm)\s*\{([^{}]*)\}", r"\1", r"\text{even}"),
    rule(r"\s+", " ", "blanks"),
    rule(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", "blanks beside signs"),
)

_DIGITS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASED = re.compile(
    r"\(?\s*(?:\\overline\s*\{)?\s*(?P<digits>\d[\dA-F]*|[A-F][\dA-F]+)\s*\}?\s*\)?\s*"
    r"_\s*\{?\s*\(?(?:(?P<base>\d+)|\\text\s*\{\s*(?P<word>[a-z]+)\s*\})\)?\s*\}?",
    re.ASCII,
)
_EQUATION = re.compile(r"[^=,;]*[^=,;<>!:]=(?P<last>[^=,;<>]+)")
_CLOCK = re.compile(r"\d+:\d\d(?!\d)")
_TIME = re.compile(r"0?(?P<hour>\d{1,2}):(?P<minute>\d\d)(?: ?(?P<half>[ap])\.? ?m\.?)?", re.IGNORECASE)
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOSEN = re.compile(r"\(([A-J])\)[^()]*")
_COLON = re.compile(r"\s*:\s*")


def spelled(text: str) -> str:
    """An answer of at most LONGEST characters in one notation, in LaTeX."""
    return bare(text, (*RULES, *NOTATION))


def plain(text: str) -> str:
    """A spelled answer simplified as text. Equal texts are equal answers."""
    for each in _TEXT_ONLY:
        text = each.pattern.sub(each.replacement, text)
    return text.strip()


def by_notation(gold: str, answer: str) -> bool | None:
    """Whether two spelled answers are equal, where their notation decides it; None where it does not.

    It decides on words such as "or more" or "not" in one of them alone, on a set's braces against parentheses, on
    numerals with a base (the base counts where both name one), on letters of choices, on times of day, 3:30, which are
    no quotients, and on two ratios, 2:5, whose terms have to be the same.
    """
    if plain(gold) == plain(answer):
        return True
    if _hedges(gold) != _hedges(answer) or _brackets(gold) + _brackets(answer) in ("{(", "({"):
        return False
    if "=" not in gold and (sides := _EQUATION.fullmatch(answer)):
        answer = sides["last"]
        if plain(gold) == plain(answer):
            return True
    one, other = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if one or other:
        same_base = one is None or other is None or _base(one) == _base(other)
        return same_base and _numeral(gold, one) == _numeral(answer, other)
    if choice := _CHOICE.fullmatch(plain(gold)):
        chosen = _CHOSEN.fullmatch(plain(answer))
        return chosen[1] == choice[1] if chosen else None
    if ":" in gold and ":" in answer:
        when, said = _TIME.fullmatch(plain(gold)), _TIME.fullmatch(plain(answer))
        if when and said:
            same_half = not when["half"] or not said["half"] or when["half"].lower() == said["half"].lower()
            return same_half and when.group("hour", "minute") == said.group("hour", "minute")
        return [plain(part) for part in _COLON.split(gold)] == [plain(part) for part in _COLON.split(answer)]
    return False if _CLOCK.search(gold) or _CLOCK.search(answer) else None


def _hedges(text: str) -> set[str]:
    return {found.lower() for found in HEDGES.findall(text)}


def _brackets(text: str) -> str:
    """The kind of bracket around an answer, after any left side of an equation: "(", "{" for a set, or ""."""
    text = text.rpartition("=")[2].replace(r"\left", "").replace(r"\right", "").strip()
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "{"
    return "(" if text.startswith("(") and text.endswith(")") else ""


def _numeral(text: str, based: re.Match[str] | None) -> str:
    return (based["digits"] if based else plain(text)).lstrip("0")


def _base(based: re.Match[str]) -> int | None:
    return int(based["base"]) if based["base"] else _DIGITS.get(based["word"])
