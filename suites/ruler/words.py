"""Counting words: the most common of a numbered list (cwe), the most frequent of a coded text (fwe)."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from random import Random

from . import wordlists
from .fit import Draft, Meter, Prompt
from .seeds import Draws, shuffled
from .tasks import COMMON_WORDS, FREQUENT_WORDS, CommonWords, FrequentWords

_LEAST_OTHER_WORDS = 10  # other words in the shortest cwe list


class CommonWordsTask:
    """Makes the drafts of cwe. Beyond the single words of the list, adjective-noun pairs fill long contexts."""

    def __init__(self, settings: CommonWords, meter: Meter, context: int, room: int):
        self.count = settings.count
        self.list = settings.short if context < settings.short_below else settings.long
        self.room = room
        self._item_tokens = _ItemTokens(meter, room)

    def draft(self, sample: int, draws: Draws) -> Draft:
        """One sample; `sample` itself is not used, all chance comes from `draws`."""
        shape, count = self.list, self.count
        common = draws("common").sample(wordlists.distinctive(), 2 * count)
        others = _OtherWords(common, draws)
        in_example = shape.example_words - count
        example = _numbered(
            common[count:], others.first(in_example), shape.example_common, shape.example_other, draws("example")
        )
        answer = " ".join(f"{i}. {word}" for i, word in enumerate(common[count:], start=1))
        before = (
            f"{COMMON_WORDS.before}{example}{COMMON_WORDS.gap}{COMMON_WORDS.question} {COMMON_WORDS.answer} {answer}\n"
        )
        return _ListDraft(before, common[:count], others, in_example, self, draws)

    def cost(self, units: int) -> float:
        """About how many tokens a list of `units` different words takes."""
        return self._item_tokens(self.count * self.list.common + (units - self.count) * self.list.other)


class _ItemTokens:
    """About how many tokens a numbered list of n words takes; longer numbers take more."""

    def __init__(self, meter: Meter, most: int):
        words = wordlists.single()[:: len(wordlists.single()) // 64]
        self._digits = range(len(str(most)))
        items = [f" {7 * 10**d}. {word}" for d in self._digits for word in words]
        counts = meter.texts(items)
        size = len(words)
        self._means = [sum(counts[d * size : (d + 1) * size]) / size for d in self._digits]

    def __call__(self, items: int) -> float:
        total = 0.0
        smaller = 0  # items whose number has fewer digits
        for digits, mean in enumerate(self._means, start=1):
            up_to = min(items, int(10**digits) - 1)
            total += mean * max(0, up_to - smaller)
            smaller = int(10**digits) - 1
        return total


class _OtherWords:
    """The words that are not common, none twice; when the single words have run out, adjective-noun pairs."""

    def __init__(self, common: Sequence[str], draws: Draws):
        self._taken = set(common)
        self._singles = shuffled(draws("others"), wordlists.single())
        self._pairs = draws("pairs")
        self._inner = [word.lower() for word in common]
        self._words: list[str] = []

    def first(self, number: int) -> list[str]:
        while len(self._words) < number:
            self._words.append(self._next())
        return self._words[:number]

    def _next(self) -> str:
        for word in self._singles:
            if word not in self._taken:
                return word
        while True:
            pair = wordlists.pair(self._pairs)
            if pair not in self._taken and not any(word in pair.lower() for word in self._inner):
                self._taken.add(pair)
                return pair


class _ListDraft:
    """A unit is a word; it stands in the list as often as its kind demands."""

    def __init__(
        self,
        before: str,
        common: Sequence[str],
        others: _OtherWords,
        in_example: int,
        task: CommonWordsTask,
        draws: Draws,
    ):
        self.least = len(common) + _LEAST_OTHER_WORDS
        self.most = max(self.least, len(common) + task.room // task.list.other)
        self.cost = task.cost
        self._before = before
        self._common = common
        self._others = others
        self._in_example = in_example
        self._shape = task.list
        self._draws = draws

    def render(self, units: int) -> Prompt:
        others = self._others.first(self._in_example + units - len(self._common))[self._in_example :]
        text = _numbered(self._common, others, self._shape.common, self._shape.other, self._draws("list order"))
        return Prompt(
            context=f"{self._before}{COMMON_WORDS.before}{text}{COMMON_WORDS.gap}",
            question=COMMON_WORDS.question,
            gen_prefix=COMMON_WORDS.answer,
            outputs=tuple(self._common),
        )


def _numbered(common: Sequence[str], others: Sequence[str], often: int, seldom: int, rng: Random) -> str:
    words = [*common] * often + [*others] * seldom
    rng.shuffle(words)
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


class FrequentWordsTask:
    """Makes the drafts of fwe. length: the tokens of which the vocabulary is a share."""

    def __init__(self, settings: FrequentWords, meter: Meter, length: int, room: int):
        from scipy.special import zeta

        self.settings = settings
        self.meter = meter
        self.room = room
        total = float(zeta(settings.alpha))
        # from this length on each answer is more frequent than the next, and the last than any other word
        last, other = settings.answers + 1, settings.answers + 2
        self.least = math.ceil(total / (last**-settings.alpha - other**-settings.alpha))
        # ranks whose share of a text of that many words is one word or more; the others are never seen
        seen, always_seen = (int((words / total) ** (1 / settings.alpha)) for words in (room, self.least))
        vocabulary = max(always_seen, other, min(length // settings.tokens_per_word, seen))
        self.shares = [rank**-settings.alpha / total for rank in range(1, vocabulary + 1)]

    def draft(self, sample: int, draws: Draws) -> Draft:
        """One sample; `sample` itself is not used, all chance comes from `draws`."""
        rng = draws("vocabulary")
        words: dict[str, None] = {self.settings.noise: None}
        while len(words) < len(self.shares):
            words["".join(rng.choices(string.ascii_lowercase, k=self.settings.letters))] = None
        return _CodedDraft(list(words), self, draws)


class _CodedDraft:
    """A unit is one word of the text's nominal length, shared out over the ranks and rounded down."""

    def __init__(self, words: list[str], task: FrequentWordsTask, draws: Draws):
        settings = task.settings
        self._shares = task.shares
        self._words = words
        self._tokens = task.meter.texts([f" {word}" for word in words])
        self._answers = tuple(words[1 : 1 + settings.answers])
        self._draws = draws
        self.least = task.least
        self.most = max(task.room, self.least)

    def cost(self, units: int) -> float:
        return sum(int(units * share) * n for share, n in zip(self._shares, self._tokens, strict=True))

    def render(self, units: int) -> Prompt:
        words = [word for word, share in zip(self._words, self._shares, strict=True) for _ in range(int(units * share))]
        self._draws("text order").shuffle(words)
        return Prompt(
            context=f"{FREQUENT_WORDS.before}{' '.join(words)}{FREQUENT_WORDS.gap}",
            question=FREQUENT_WORDS.question,
            gen_prefix=FREQUENT_WORDS.answer,
            outputs=self._answers,
        )
