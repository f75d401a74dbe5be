"""Prompts that fill a context: count tokens as the model will see them, and grow a haystack to the limit.

A haystack grows by whole units (sentences, needles, words, documents). The number of units is estimated
from what a unit costs, then corrected with exact encodes of the whole prompt, usually one or two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from evictbench.errors import UserError
from evictbench.suite.chat_template import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_CHARS = 4_000_000  # encoded at a time, which bounds the memory of a count
_ESTIMATES = 6  # steps by estimate before the bracket is halved instead


@dataclass(frozen=True)
class Prompt:
    """One sample's text. The context ends where the question begins; together they are the user's turn."""

    context: str
    question: str
    gen_prefix: str
    outputs: tuple[str, ...]

    @property
    def input(self) -> str:
        """The user's turn."""
        return self.context + self.question


class Draft(Protocol):
    """A sample whose haystack can still grow: from `least` to `most` units."""

    least: int
    most: int

    def cost(self, units: int) -> float:
        """About how many tokens `units` of haystack take; never falls as units grow."""

    def render(self, units: int) -> Prompt:
        """The prompt with that many units of haystack."""


class Meter:
    """Counts tokens with one tokenizer, of bare texts and of whole prompts.

    A whole prompt is what the model is given: with chat, the user's turn in the chat template (its default
    system prompt included), the assistant's header and the answer prefix; without, input and prefix.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool):
        self.tokenizer = tokenizer
        self.chat = chat
        if chat and not getattr(tokenizer, "chat_template", None):
            raise UserError("The tokenizer has no chat template; run without the chat format.")
        if self.texts(["The grass is green."])[0] == 0:
            raise UserError("The tokenizer encodes text to no tokens, so that lengths cannot be measured.")
        self._reserve = self._template_reserve() if chat else 0

    def texts(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text by itself, without special tokens."""
        return self._count(texts, special=False)

    def prompts(self, prompts: Sequence[Prompt]) -> list[int]:
        """Tokens of each whole prompt, special tokens included."""
        if not self.chat:
            return self._count([" ".join((p.input, p.gen_prefix)).rstrip() for p in prompts], special=True)
        rendered = [self._chat_text(p.input) + p.gen_prefix for p in prompts]
        return [count + self._reserve for count in self._count(rendered, special=False)]

    def _count(self, texts: Sequence[str], special: bool) -> list[int]:
        counts: list[int] = []
        for batch in _batches(texts):
            encoded = self.tokenizer(
                batch,
                add_special_tokens=special,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            counts += [len(ids) for ids in encoded["input_ids"]]
        return counts

    def _chat_text(self, text: str, **options: Any) -> str:
        turn = [{"role": "user", "content": text}]
        return render(self.tokenizer, turn, add_generation_prompt=True, **options)

    def _template_reserve(self) -> int:
        """Tokens to keep free for the longest form of a template that can switch thinking on and off."""
        forms = [self._chat_text("x", **o) for o in ({}, {"enable_thinking": False}, {"enable_thinking": True})]
        plain, *others = self._count(forms, special=False)
        return max(0, *(n - plain for n in others))


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    chars = 0
    for text in texts:
        if batch and chars + len(text) > _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
        batch.append(text)
        chars += len(text)
    if batch:
        yield batch


class _Search:
    """The bracket around the largest number of units that fits, for one draft."""

    def __init__(self, draft: Draft, base: float, room: int):
        self.draft = draft
        self.base = base
        self.room = room
        self.fits: tuple[int, Prompt, int] | None = None  # units, prompt, tokens
        self.too_many = draft.most + 1
        self.rounds = 0
        self.units: int | None = self._units_costing(room - base)
        self.prompt: Prompt

    def propose(self) -> Prompt:
        assert self.units is not None
        self.prompt = self.draft.render(self.units)
        return self.prompt

    def learn(self, tokens: int) -> None:
        """Take the exact count of the proposed prompt, and choose the next proposal, or None."""
        assert self.units is not None
        units, cost = self.units, self.draft.cost
        free = self.room - tokens
        self.rounds += 1
        # tokens for each token of cost; 1 where the estimate was right
        scale = min(10.0, max(0.1, (tokens - self.base) / (cost(units) or 1.0)))
        if free >= 0:
            self.fits = (units, self.prompt, tokens)
        else:
            self.too_many = units
        least = self.fits[0] + 1 if self.fits else self.draft.least
        full = free >= 0 and units < self.draft.most and scale * (cost(units + 1) - cost(units)) > free
        if least >= self.too_many or full:
            self.units = None
        elif self.rounds >= _ESTIMATES:
            self.units = (least + self.too_many) // 2
        else:
            self.units = min(max(self._units_costing(cost(units) + free / scale), least), self.too_many - 1)

    def _units_costing(self, tokens: float) -> int:
        span = range(self.draft.least, self.draft.most + 1)
        return self.draft.least + max(0, bisect_right(span, tokens, key=self.draft.cost) - 1)


def fit(drafts: Sequence[Draft], meter: Meter, base: float, room: int) -> list[tuple[Prompt, int] | None]:
    """The fullest prompt of at most `room` tokens for each draft, with its exact number of tokens.

    base: about how many tokens a prompt has beyond its haystack. None where not even the least haystack fits.
    """
    searches = [_Search(draft, base, room) for draft in drafts]
    while pending := [search for search in searches if search.units is not None]:
        for search, tokens in zip(pending, meter.prompts([s.propose() for s in pending]), strict=True):
            search.learn(tokens)
    return [search.fits[1:] if search.fits else None for search in searches]
