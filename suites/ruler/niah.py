"""Needles in a haystack: the eight niah tasks."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence

from . import wordlists
from .fit import Draft, Meter, Prompt
from .haystack import Essay
from .seeds import Draws
from .tasks import MANY_NEEDLES, NEEDLE, NOISE, ONE_NEEDLE, Kind, Needles

DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # per cent of an essay's sentences; drawn without repeat

_PROBES = 64


def _number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_KINDS: dict[Kind, Callable[[random.Random], str]] = {
    "words": wordlists.pair,
    "numbers": _number,
    "uuids": _uuid,
}


class _Distinct:
    """Draws of one kind, none of them twice and none that stands in the essay."""

    def __init__(self, kind: Kind, rng: random.Random, essay: Essay | None):
        self._draw = _KINDS[kind]
        self._rng = rng
        self._essay = essay
        self._taken: set[str] = set()

    def __call__(self) -> str:
        while True:
            drawn = self._draw(self._rng)
            if drawn not in self._taken and not (self._essay and drawn in self._essay):
                self._taken.add(drawn)
                return drawn


class NeedleTask:
    """Makes the drafts of one niah task. essay: the haystack of the tasks that need one."""

    def __init__(self, settings: Needles, meter: Meter, room: int, essay: Essay | None = None):
        self.settings = settings
        self.essay = essay if settings.haystack == "essay" else None
        self.room = room
        if settings.haystack == "noise":
            self.unit_tokens = float(meter.texts([f"{NOISE}\n"])[0])
        else:
            rng = random.Random("needle probe")
            key, value = _KINDS[settings.key], _KINDS[settings.value]
            probes = [needle(settings, key(rng), value(rng)) + "\n" for _ in range(_PROBES)]
            self.unit_tokens = sum(meter.texts(probes)) / _PROBES

    def draft(self, sample: int, draws: Draws) -> Draft:
        """One sample; `sample` itself is not used, all chance comes from `draws`."""
        settings = self.settings
        new_key = _Distinct(settings.key, draws("keys"), self.essay)
        new_value = _Distinct(settings.value, draws("values"), self.essay)
        pairs = {new_key(): [new_value() for _ in range(settings.values)] for _ in range(settings.keys)}
        needles = [needle(settings, key, value) for key, values in pairs.items() for value in values]
        draws("order").shuffle(needles)
        asked = draws("queries").sample(list(pairs), settings.queries)
        ask = _Ask(settings, asked, tuple(value for key in asked for value in pairs[key]))
        if self.essay:
            return _EssayDraft(ask, needles, self.essay, self.essay.within(self.room), draws)
        if settings.haystack == "noise":
            return _LineDraft(ask, needles, lambda: NOISE, self.unit_tokens, self.room, draws)
        return _LineDraft(
            ask,
            needles,
            lambda: needle(settings, new_key(), new_value()),
            self.unit_tokens,
            self.room,
            draws,
        )


def needle(settings: Needles, key: str, value: str) -> str:
    """The sentence that hides a value."""
    return NEEDLE.format(kinds=settings.value, key=key, value=value)


class _Ask:
    """Instruction, question and answers around a haystack."""

    def __init__(self, settings: Needles, asked: Sequence[str], answers: tuple[str, ...]):
        *first, last = asked
        query = f"{', '.join(first)}, and {last}" if first else last
        self._wording = ONE_NEEDLE if len(answers) == 1 else MANY_NEEDLES
        self._names = {"kind": settings.value[:-1], "query": query}
        self._answers = answers

    def __call__(self, haystack: str) -> Prompt:
        wording, names = self._wording, self._names
        return Prompt(
            context=wording.before.format(**names) + haystack + wording.gap,
            question=wording.question.format(**names),
            gen_prefix=wording.answer.format(**names),
            outputs=self._answers,
        )


class _LineDraft:
    """Needles among lines of noise or of other needles; every place is equally likely."""

    def __init__(
        self,
        ask: _Ask,
        needles: Sequence[str],
        new_line: Callable[[], str],
        line_tokens: float,
        most: int,
        draws: Draws,
    ):
        self.least = len(needles) + 1
        self.most = most
        self._ask = ask
        self._needles = needles
        self._new_line = new_line
        self._line_tokens = line_tokens
        self._draws = draws
        self._lines: list[str] = []

    def cost(self, units: int) -> float:
        return units * self._line_tokens

    def render(self, units: int) -> Prompt:
        while len(self._lines) < units:
            self._lines.append(self._new_line())
        places = sorted(self._draws("places").sample(range(units), len(self._needles)))
        return self._ask("\n".join(_inserted(self._lines[:units], self._needles, places)))


class _EssayDraft:
    """Needles between the sentences of an essay, at depths drawn from DEPTHS."""

    def __init__(self, ask: _Ask, needles: Sequence[str], essay: Essay, most: int, draws: Draws):
        self.least = len(needles) + 1
        self.most = max(most, self.least)
        self._ask = ask
        self._needles = needles
        self._essay = essay
        self._depths = sorted(draws("places").sample(DEPTHS, len(needles)))

    def cost(self, units: int) -> float:
        return self._essay.tokens(units)

    def render(self, units: int) -> Prompt:
        places = [units * depth // 100 for depth in self._depths]
        return self._ask(" ".join(_inserted(self._essay.sentences(units), self._needles, places)))


def _inserted(lines: Sequence[str], needles: Sequence[str], places: Sequence[int]) -> list[str]:
    """The lines with each needle before the line at its place; places rise and may be equal."""
    mixed: list[str] = []
    last = 0
    for place, text in zip(places, needles, strict=True):
        mixed += [*lines[last:place], text]
        last = place
    return [*mixed, *lines[last:]]
