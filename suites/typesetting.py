r"""How an answer looks: fonts, colours, spacing and frames are taken from it, and what it says is left.

`RULES` is the whole of it, in the order of use. Suites add rules of their own, in the same form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

LONGEST = 1000
"""Characters of the longest answer that is read. Gold answers have 200 at most, and a model that repeats itself may
write tens of thousands. Cut before any of these patterns sees the text: some take the square of its length."""

_PASSES = 10  # rules uncover work for earlier ones, as in \textbf{\textit{7}}


class Rule(NamedTuple):
    """Every match of `pattern` becomes `replacement`. why: the writing that it is for."""

    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]
    why: str


def rule(pattern: str, replacement: str | Callable[[re.Match[str]], str], why: str) -> Rule:
    """A Rule of a pattern that is not compiled yet."""
    return Rule(re.compile(pattern), replacement, why)


_MATH_FONTS = "mathbf|mathit|mathsf|mathtt|mathnormal|boldsymbol|bm|pmb|underline|uline|ensuremath"
_TEXT_FONTS = "textbf|textit|textrm|textsf|texttt|textsc|textsl|textup|textmd|textnormal|emph|mbox|hbox"
_OLD_FONTS = "rm|bf|it|sf|tt|sl|sc|em|bfseries|itshape|rmfamily|sffamily|ttfamily|upshape|normalfont"
_SIZES = (
    "tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|"
    "displaystyle|textstyle|scriptstyle|scriptscriptstyle|boldmath|centering"
)
_FONT = re.compile(rf"\\(?:(?P<math>{_MATH_FONTS})|text)\s*\{{")
_FORMULA = re.compile(r"\\[A-Za-z]|\A(?!.*[A-Za-z]{2}).*[-=+^_<>*/]", re.DOTALL)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

RULES: tuple[Rule, ...] = (
    rule("[\uff01-\uff5e]", lambda match: chr(ord(match[0]) - 0xFEE0), "full-width letters: ７"),
    rule("[\u00a0\u2000-\u200a\u202f\u205f\u3000]", " ", "blanks of Unicode"),
    rule("[\u200b-\u200d\u2060\ufeff]", "", "characters without width"),
    rule("[\u2212\u2013\ufe63]", "-", "minus and dash of Unicode"),
    rule(r"\\[hv]?phantom\s*\{[^{}]*\}", "", "what is not printed"),
    rule(r"\\(?:tag\*?|label)\s*\{[^{}]*\}", "", "numbers of equations"),
    rule(r"(?<!\\)(?:\\!|\\negthinspace(?![A-Za-z]))\s*", "", r"negative spaces: 10,\! 080"),
    rule(r"\\\\\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]", r"\\\\", r"\\[4pt] between the rows of a matrix"),
    rule(r"(?:\\\\\s*)+$", "", r"a line break at the end: 7 \\"),
    rule(r"\\[hv]space\*?\s*\{[^{}]*\}", " ", r"\hspace{1em}"),
    rule(r"(?<!\\)(?:\\[,;:> ]|~)", " ", r"spaces: 60\,"),
    rule(r"\\(?:q?quad|(?:thin|med|thick|en)space|hfill)(?![A-Za-z])", " ", r"spaces: \quad 60"),
    rule(r"\\(?:text|page)?color(?:box)?\s*(?:\[\w*\])?\s*\{[\w!.,\- ]*\}", "", r"\color{red}{7}, \textcolor{red}{7}"),
    rule(rf"\\(?:{_SIZES})(?![A-Za-z])\s*", "", r"\displaystyle, {\Large 7}"),
    rule(r"\{\s*\\(?:rm|normalfont|rmfamily)(?![A-Za-z])\s*", r"\\text{", r"{\rm cm}"),
    rule(rf"\\(?:{_OLD_FONTS})(?![A-Za-z])\s*", "", r"{\bf 60}"),
    rule(rf"\\(?:{_TEXT_FONTS})\s*\{{", r"\\text{", r"\textbf{even}, \mbox{ inches}"),
    rule(rf"([\^_])\s*\\(?:{_MATH_FONTS})\s*\{{", r"\1{", r"x^\mathbf{12}: these braces stay"),
    rule(rf"\\(?:{_MATH_FONTS})(?![A-Za-z])\s*(?=[^\s{{])", "", r"\mathbf 7"),
    rule(r"\\(?:math(?:rm|op|ord)|operatorname\*?)\s*\{([^{}A-Za-z]*)\}", r"\1", r"\mathrm{7}"),
    rule(r"\\text\s*\{([^{}A-Za-z]*)\}", r"\1", r"\text{7}"),
    rule(r"^\\text\s*\{\s*(-?\d[\d.,/]*)\s+([^{}\d]*)\}$", r"\1\\text{ \2}", r"\text{5 apples}"),
    rule(r"\{\s*([,:;])\s*\}", r"\1", "1{,}000, 3{:}30"),
    rule(r"\\?\$|`|(?<!\\)\\[()\[\]]", "", r"$7$, \$7, `7`, \(7\), \[7\]"),
    rule("[£€¥¢]", "", "money"),
    rule(r"\\(?:blacksquare|square|qed|Box|checkmark)(?![A-Za-z])\s*$|[■∎✓✔✅]\s*$", "", "the end of a proof"),
    rule(r"""^[\s*"“”]+|[\s*"“”]+$""", "", "**7**"),
    rule(r"(?<=[\w})\]!])[.,;:]+$", "", "7."),
    rule(r"(?<=\w)\.\s*(?=\}$)", "", r"\text{even.}"),
)


def bare(text: str, rules: Sequence[Rule] = RULES) -> str:
    """An answer of at most LONGEST characters with `rules` applied until nothing changes, without fonts, and without
    braces around the whole of it."""
    for _ in range(_PASSES):
        before = text
        text = _without_fonts(text)
        for each in rules:
            text = each.pattern.sub(each.replacement, text)
        text = _without_outer_braces(text.strip())
        if text == before:
            break
    return text


def _without_fonts(text: str) -> str:
    r"""\mathbf{x + 1} is x + 1, and so is \text{x + 1}, without words. A blank keeps a command before it apart."""
    start = 0
    while match := _FONT.search(text, start):
        start = match.start()
        end = closing_brace(text, match.end())
        before, after = text[:start], text[match.end() :]
        content = "" if end is None else text[match.end() : end]
        stays = end is None or before.rstrip()[-1:] in ("^", "_") or not (match["math"] or _FORMULA.search(content))
        if stays or end is None:
            start = match.end()
            continue
        apart = " " if before[-1:].isalpha() and content[:1].isalpha() else ""
        text = before + apart + content + after[end - match.end() + 1 :]
    return text


def _without_outer_braces(text: str) -> str:
    while text.startswith("{") and closing_brace(text, 1) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def closing_brace(text: str, start: int) -> int | None:
    """Where the brace stands that closes the one before `start`; None if none does. Escaped braces are text."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        if match[0] in "{}":
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                return match.start()
    return None
