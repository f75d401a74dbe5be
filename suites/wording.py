"""Words around an answer: those that announce it, those that say it is not the answer, and those that leave it open."""

from __future__ import annotations

import re

ANNOUNCED = re.compile(
    r"^(\\text\s*\{)?\s*(?:(?:so|thus|hence|therefore)\b,?\s*)?(?:the\s+|our\s+|my\s+)?(?:final\s+|correct\s+)?"
    r"answer\s*(?:is\b\s*:?|:|=)\s*(?!not\b)",
    re.IGNORECASE,
)
r"""The beginning of "the answer is 7"; group 1 is there inside a \text{} that has more to say."""

_COMPARED = (
    r"(?:at|or)\s+(?:least|most|more|less|fewer|greater|higher|lower|above|below|larger|smaller)|"
    r"(?:more|less|fewer|greater|larger|smaller)\s+than|up\s+to"
)

COMPARED = re.compile(rf"\b(?:{_COMPARED})\b", re.IGNORECASE)
"""Words that make a bound of a number."""

HEDGES = re.compile(
    rf"n['’]t\b|\b(?:{_COMPARED}|not|cannot|never|neither|nor|except|unless|approximately|approx|about|roughly|almost|"
    r"nearly|incorrect|wrong|impossible)\b",
    re.IGNORECASE,
)
"""Words that make "7 or more" another answer than 7."""

_NEGATION = r"(?:not|n['’]t|never|no\s+longer|neither|anything\s+but|anything\s+except|other\s+than|none\s+of)"
_ADVERB = (
    r"(?:(?:definitely|clearly|certainly|obviously|probably|likely|therefore|thus|so|also|actually|simply|be)\s+)*"
)

REJECTED = re.compile(
    rf"\s*{_ADVERB}{_NEGATION}(?![\w-])(?!\s+(?:only|just|merely|sure|certain|clear)\b)", re.IGNORECASE
)
"""The beginning of "not (B)", as what follows "the answer is"; "not only (B)" and "not sure" reject nothing."""

_WHOSE = r"(?:that\s+)?(?:the\s+|its\s+|my\s+|our\s+)?(?:final\s+|correct\s+|right\s+)?\Z"

DENIED_BEFORE = re.compile(
    r"(?:n['’]t|\b(?:not|never|doubt))\s+(?:(?:think|believe|say|claim|mean|true|correct|right|the\s+case)\s+)?"
    + _WHOSE,
    re.IGNORECASE,
)
"""The end of "I don't think that the", before "answer is (B)"."""

SUPPOSED_BEFORE = re.compile(r"\b(?:if|whether|unless|suppose|supposing|assume|assuming)\s+" + _WHOSE, re.IGNORECASE)
"""The end of "if the", before "answer is (B)"."""

CORRECTED = re.compile(
    r"\b(?:but(?:\s+(?:rather|instead|is|it\s+is|it['’]s))?|it\s+is(?!\s+not\b)|it['’]s(?!\s+not\b)|"
    r"instead|rather(?!\s+than)|"
    r"(?<=[,;] )(?:so|hence|thus|therefore)(?:\s+it\s+(?:is|must\s+be|has\s+to\s+be))?)\b[\s,:]*",
    re.IGNORECASE,
)
"""What turns "not (B)" to the answer: "but", "it is", "rather", ", so"."""
