"""LongBench's rule for prompts that are too long: keep the first and the last half of what fits.

The length is that of the prompt as the model reads it, chat template and answer included, so that the cut prompt always
fits. Upstream counts the text alone, and its prompts may come out longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.suite.chat_template import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LEAST = 32  # tokens of a prompt that are still worth a question
_DATE_SLACK = 4  # tokens by which another day may lengthen a template that prints the date


@dataclass(frozen=True)
class Text:
    """The user's text. border: the character at which the question begins. cut: whether part of it is left out."""

    whole: str
    border: int
    cut: bool = False


class Cutter:
    """Cuts prompts to `room` tokens, chat template included. room: None for prompts of any length."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool, room: int | None):
        self.tokenizer = tokenizer
        self.chat = chat
        self.room = room

    def fit(self, texts: Sequence[Text]) -> list[Text]:
        """Each text unchanged if it fits, else cut in the middle. Raises UserError where too little would be left."""
        if self.room is None:
            return list(texts)
        lengths = self._prompt_lengths([text.whole for text in texts])
        return [
            text if tokens <= self.room else self._cut_to_room(text, self.room)
            for text, tokens in zip(texts, lengths, strict=True)
        ]

    def _cut_to_room(self, text: Text, room: int) -> Text:
        limit = room - self._overhead
        while limit >= _LEAST:
            shorter = cut(text, limit, self.tokenizer)
            # where the halves meet, and at a template's edges, the text may be tokenized in another way
            over = self._prompt_lengths([shorter.whole])[0] - room
            if over <= 0:
                return shorter
            limit -= over
        raise UserError(
            f"LongBench's prompts cannot be cut to {room} tokens, chat template included: "
            "the context, or the model's window, is too small for the answers asked for."
        )

    @cached_property
    def _overhead(self) -> int:
        """Tokens that a prompt has beyond those of its text."""
        return self._prompt_lengths(["x"])[0] - len(_ids(self.tokenizer, ["x"])[0])

    def _prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        if self.chat:
            forms = [self._in_template(text) for text in texts]
            return [len(ids) + self._reserve for ids in _ids(self.tokenizer, forms)]
        return [len(ids) for ids in _ids(self.tokenizer, texts, special=True)]

    @cached_property
    def _reserve(self) -> int:
        """Tokens to keep free for the longest form of a template that can switch thinking on and off."""
        forms = [self._in_template("x", **o) for o in ({}, {"enable_thinking": False}, {"enable_thinking": True})]
        plain, *others = (len(ids) for ids in _ids(self.tokenizer, forms))
        dated = _DATE_SLACK if "strftime_now" in str(self.tokenizer.chat_template) else 0
        return max(0, *(tokens - plain for tokens in others)) + dated

    def _in_template(self, text: str, **options: Any) -> str:
        turn = [{"role": "user", "content": text}]
        return render(self.tokenizer, turn, add_generation_prompt=True, **options)


def cut(text: Text, limit: int, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The text of the first and of the last limit // 2 tokens.

    The border stays at the end of the context; if that end is cut away, the border is where the halves meet.
    """
    half = limit // 2
    head, tail = _halves(text.whole, half, tokenizer)
    question = len(text.whole) - text.border
    border = text.border if text.border <= len(head) else len(head) + max(0, len(tail) - question)
    return Text(head + tail, border, cut=True)


def _halves(text: str, half: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text of the first and of the last `half` tokens.

    It is taken from the text by the tokens' offsets. Decoding the tokens would drop a blank at the beginning of the
    second half, or leave half a character, with some tokenizers.
    """
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ends = [end for _, end in encoded["offset_mapping"]]
        return text[: ends[half - 1]], text[ends[len(ends) - half - 1] :]
    ids = _ids(tokenizer, [text])[0]
    return str(tokenizer.decode(ids[:half])), str(tokenizer.decode(ids[-half:]))


def _ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special: bool = False) -> list[list[int]]:
    encoded = tokenizer(
        list(texts),
        add_special_tokens=special,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return list(encoded["input_ids"])
