"""Where an answer ends: models that run on begin a turn of the user's, or invent a question and answer that too.

A task file names `first_answers` as its filter; then what comes after the answer is not graded. The markers are those
at which lm-eval's tasks for these benchmarks stop, and the role markers of common chat formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_TURN = re.compile(
    r"<\|(?:im_start|im_end|start_header_id|end_header_id|begin_of_text|eot_id|endoftext|end|user|assistant|system)\|>"
    r"|</?s>|<(?:start|end)_of_turn>|\[INST\]"
    r"|^###[ ]*(?:Instruction|Human|User|Input)\b"
    r"|^(?:\*\*)?(?:User|Human|USER|HUMAN)(?:\*\*)?:"
    r"|^(?:user|human)[ \t]*$",
    re.MULTILINE,
)
"""A new turn. A decoded text has no special tokens, so that of a role marker the role alone may be left, on a line."""

_QUESTION = re.compile(r"^(?:[#*>][#*> ]*)?(?P<word>Question|QUESTION|Problem|PROBLEM|Q)(?:\*\*)?:", re.MULTILINE)
"""A new question. With a number ("Question 2:") it may be a step of the solution, and does not count."""

_LEAST_WORDS = 5
"""Words on the line of a question that begins with "Q:", which may also be a point or a variable."""

_COMPARED_WORDS, _COMPARED_CHARS = 6, 400
"""So many first words of a question, of at most so many characters, say whether it is the one that was asked."""

_WORD = re.compile(r"\w+")


def first_answers(responses: Iterable[Sequence[str]], docs: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """lm-eval filter function: each response up to the end of its answer.

    A document's `question`, or else its `input`, is what was asked.
    """
    return [
        [first_answer(text, str(doc.get("question") or doc.get("input") or "")) for text in of_document]
        for of_document, doc in zip(responses, docs, strict=True)
    ]


def first_answer(text: str, asked: str = "") -> str:
    """A response up to the first new turn or question. asked: the question, which a response may state again.

    A marker with nothing but blanks before it ends nothing. The time is linear in the text's length.
    """
    begin, known = len(text) - len(text.lstrip()), _words(asked)
    end = next((match.start() for match in _TURN.finditer(text) if match.start() > begin), len(text))
    questions = (match for match in _QUESTION.finditer(text, 0, end) if match.start() > begin)
    return text[: next((match.start() for match in questions if _is_new(text, match, known)), end)]


def _is_new(text: str, match: re.Match[str], known: str) -> bool:
    """Whether a question is another than the one that was asked. known: the words of the latter."""
    following = text[match.end() : match.end() + _COMPARED_CHARS]
    if match["word"] == "Q" and len(following.strip().partition("\n")[0].split()) < _LEAST_WORDS:
        return False
    beginning = " ".join(_words(following).split()[:_COMPARED_WORDS])
    return not beginning or beginning not in known


def _words(text: str) -> str:
    """A text's words in lower case, one blank between."""
    return " ".join(_WORD.findall(text.lower()))
