"""Cutting texts between words to a number of tokens of the model's tokenizer."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PIECE = re.compile(r"\s*\S{1,40}")
_PREPARED_CHARS = 4_000_000  # encoded at a time


class Encoder:
    """Counts and encodes plain text without special tokens. around: how many of those a text gets."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self.around = len(tokenizer("a")["input_ids"]) - len(tokenizer("a", add_special_tokens=False)["input_ids"])

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def counts(self, texts: list[str]) -> list[int]:
        """Tokens of each text."""
        counts: list[int] = []
        batch: list[str] = []
        size = 0
        for text in [*texts, None]:
            if text is None or size > _PREPARED_CHARS:
                if batch:
                    encoded = self._tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
                    counts += [len(ids) for ids in encoded]
                batch, size = [], 0
            if text is not None:
                batch.append(text)
                size += len(text)
        return counts

    def after(self, prompt: str, continuation: str) -> list[int]:
        """Token ids of a continuation behind its prompt, with no token across the border between the two."""
        tail = prompt[-200:]
        tail = tail[tail.find(" ") + 1 :] if len(prompt) > 200 else tail
        before, both = self.ids(tail), self.ids(tail + continuation)
        return both[len(before) :] if both[: len(before)] == before else self.ids(continuation)


class Words:
    """A text as words, each with the blanks before it, and about how many tokens its first n words take."""

    def __init__(self, text: str, encoder: Encoder):
        self._pieces = _PIECE.findall(text)
        self._tokens = [0, *accumulate(encoder.counts(self._pieces))]
        self._encoder = encoder

    @property
    def tokens(self) -> int:
        """About how many tokens the text has."""
        return self._tokens[-1]

    def window(self, start: int, prompt: int, continuation: int) -> tuple[str, list[int]] | None:
        """The longest prompt of at most `prompt` tokens, and the ids of the `continuation` tokens behind it.

        The continuation begins about `start + prompt` tokens into the text. None where the text is too short.
        """
        border = bisect_right(self._tokens, start + prompt) - 1
        first = bisect_left(self._tokens, start)
        end = min(len(self._pieces), bisect_left(self._tokens, self._tokens[border] + continuation) + continuation // 8)
        while first < border:
            text = "".join(self._pieces[first:border]).lstrip()
            over = len(self._encoder.ids(text)) - prompt
            if over <= 0:
                ids = self._encoder.after(text, "".join(self._pieces[border:end]))[:continuation]
                return (text, ids) if len(ids) == continuation else None
            first = max(first + 1, bisect_left(self._tokens, self._tokens[first] + over))
        return None
