"""Counting words: the most common of a numbered list (cwe), the most frequent of a coded text (fwe)."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from random import Random

from . import wordlists
from .fit import Draft, Meter, Prompt
from .seeds import Draws
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
        most = count + max(_LEAST_OTHER_WORDS, self.room // (2 * shape.other))
        others = _OtherWords(common, shape.example_words - count, most - count, draws)
        example = _numbered(
            common[count:], others.of_example, shape.example_common, shape.example_other, draws("example")
        )
        answer = " ".join(f"{i}. {word}" for i, word in enumerate(common[count:], start=1))
        before = (
            f"{COMMON_WORDS.before}{example}{COMMON_WORDS.gap}{COMMON_WORDS.question} {COMMON_WORDS.answer} {answer}\n"
        )
        return _ListDraft(before, common[:count], others, self, most, draws)

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
    """The words that are not common: first the example's, then the list's, none twice."""

    def __init__(self, common: Sequence[str], example: int, most: int, draws: Draws):
        pool = wordlists.single()
        wanted = example + most + len(common)
        drawn = draws("others").sample(pool, min(wanted, len(pool)))
        self._words = [word for word in drawn if word not in common]
        self._taken = {*common, *self._words}
        self._pairs = draws("pairs")
        self._forbidden = {word.lower() for word in common}
        self.of_example, self._words = self._words[:example], self._words[example:]

    def first(self, number: int) -> list[str]:
        while len(self._words) < number:
            pair = wordlists.pair(self._pairs)
            if pair not in self._taken and not any(word in pair.lower() for word in self._forbidden):
                self._taken.add(pair)
                self._words.append(pair)
        return self._words[:number]


class _ListDraft:
    """A unit is a word; it stands in the list as often as its kind demands."""

    def __init__(
        self,
        before: str,
        common: Sequence[str],
        others: _OtherWords,
        task: CommonWordsTask,
        most: int,
        draws: Draws,
    ):
        self.least = len(common) + _LEAST_OTHER_WORDS
        self.most = most
        self.cost = task.cost
        self._before = before
        self._common = common
        self._others = others
        self._shape = task.list
        self._draws = draws

    def render(self, units: int) -> Prompt:
        others = self._others.first(units - len(self._common))
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
    """Makes the drafts of fwe."""

    def __init__(self, settings: FrequentWords, meter: Meter, context: int, room: int):
        from scipy.special import zeta

        self.settings = settings
        self.meter = meter
        self.room = room
        # a rank whose share of a text of `room` words is less than one word is never seen
        seen = int(room ** (1 / settings.alpha)) + 1
        self.vocabulary = max(settings.answers + 2, min(context // settings.context_per_word, seen))
        total = float(zeta(settings.alpha))
        self.shares = [rank**-settings.alpha / total for rank in range(1, self.vocabulary + 1)]

    def draft(self, sample: int, draws: Draws) -> Draft:
        """One sample; `sample` itself is not used, all chance comes from `draws`."""
        rng = draws("vocabulary")
        words: dict[str, None] = {self.settings.noise: None}
        while len(words) < self.vocabulary:
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
        # from here on each answer is more frequent than the next, and the last than any other word
        gap = self._shares[settings.answers] - self._shares[settings.answers + 1]
        self.least = math.ceil(1 / gap)
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
