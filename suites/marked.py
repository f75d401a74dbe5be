"""Answers after a marker ("So the answer is (B)."), for suites whose worked examples end that way."""

from __future__ import annotations

import re
from collections.abc import Iterator

_MARKER = re.compile(r"""\banswer(?:\s+is\b|\s*:)(?:[\s:*_`"“'‘]|\$\$|\\\[|\\\()*""", re.IGNORECASE)
_SENTENCE_END = re.compile(r"""\n|[.!?](?=[\s*_`"”'’)\]}]|$)""")


def marked(text: str) -> Iterator[str]:
    """The text after each "answer is" or "answer:", up to the end of its sentence or line, or to the next marker. The
    last answer comes first.

    The full stop that ends an answer is the only thing that is taken from it.
    """
    limit = len(text)
    for marker in reversed(list(_MARKER.finditer(text))):
        end = _SENTENCE_END.search(text, marker.end(), limit)
        yield text[marker.end() : end.start() if end else limit].strip()
        limit = marker.start()
