"""Answers after a marker ("So the answer is (B)."), for suites whose worked examples end that way."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .wording import CORRECTED, DENIED_BEFORE, REJECTED, SUPPOSED_BEFORE

_MARKER = re.compile(
    r"""\banswer(?:\s+is(?:\b|(?=n['’]t\b))|\s+(?:can|could|must|should|will|would|may|does)(?=\s*not\b|n['’]t\b)|"""
    r"""\s+ca(?=n['’]t\b)|\s*:)(?:[\s:*_`"“'‘]|\$\$|\\\[|\\\()*""",
    re.IGNORECASE,
)
_BEFORE = 60  # characters before a marker that may deny or suppose it: "I don't think that the"
_SENTENCE_END = re.compile(r"""\n|[.!?](?=[\s*_`"”'’)\]}]|$)""")


def marked(text: str) -> Iterator[str]:
    """The text after each "answer is" or "answer:", up to the end of its sentence or line, or to the next marker. The
    last answer comes first.

    The full stop that ends an answer is the only thing that is taken from it. A sentence that says what the answer is
    not gives what it says instead ("not (B) but (C)" gives "(C)"), or "" ("cannot be (B)", "I don't think the answer is
    (B)"). What is only supposed ("if the answer is (B)") is left out.
    """
    limit = len(text)
    for marker in reversed(list(_MARKER.finditer(text))):
        end = _SENTENCE_END.search(text, marker.end(), limit)
        before = text[max(0, marker.start() - _BEFORE) : marker.start()]
        if not SUPPOSED_BEFORE.search(before):
            said = text[marker.end() : end.start() if end else limit].strip()
            yield "" if DENIED_BEFORE.search(before) else affirmed(said)
        limit = marker.start()


def affirmed(sentence: str) -> str:
    """An answer's sentence; of one that begins with a rejection, what follows "but" or "it is", else ""."""
    rejection = REJECTED.match(sentence)
    if rejection is None:
        return sentence
    turn = CORRECTED.search(sentence, rejection.end())
    return sentence[turn.end() :] if turn else ""
