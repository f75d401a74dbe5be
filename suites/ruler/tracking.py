"""Variable tracking (vt): one chain of assignments in noise, after a worked example."""

from __future__ import annotations

import string
from bisect import bisect_right
from itertools import pairwise
from random import Random

from .fit import Draft, Meter, Prompt
from .seeds import Draws, draws
from .tasks import NOISE, Tracking, Wording


class TrackingTask:
    """Makes the drafts of vt. The example has as much noise as its token limit allows with this tokenizer."""

    def __init__(self, settings: Tracking, wording: Wording, meter: Meter, room: int):
        self.settings = settings
        self.wording = wording
        self.room = room
        self.unit_tokens = meter.texts([f"{NOISE}\n"])[0]
        probe = draws("vt", 0, "example probe")
        names = _names(settings.example_name_letters, settings.hops + 1, probe("names"))
        span = range(settings.example_least_noise, settings.example_tokens // self.unit_tokens + 2)
        counts = meter.texts([_ask(wording, _text(names, "12345", n, probe), "12345", names).input for n in span])
        prefix = meter.texts([f" {wording.answer.format(count=len(names), query='12345')}"])[0]
        fitting = bisect_right(counts, settings.example_tokens - prefix)
        self.example_noise = span[0] + max(0, fitting - 1)

    def draft(self, sample: int, draws: Draws) -> Draft:
        """One sample; `sample` itself is not used, all chance comes from `draws`."""
        settings = self.settings
        value, example_value = (str(n) for n in draws("values").sample(range(10_000, 99_999), 2))
        names = _names(settings.name_letters, settings.hops + 1, draws("names"))
        shown = _names(settings.example_name_letters, settings.hops + 1, draws("example names"))
        text = _text(shown, example_value, self.example_noise, lambda purpose: draws(f"example {purpose}"))
        example = _ask(self.wording, text, example_value, shown)
        before = f"{example.input} {example.gen_prefix} {' '.join(shown)}\n\n"
        return _Draft(self.wording, before, names, value, self.unit_tokens, self.room, draws)


class _Draft:
    def __init__(
        self,
        wording: Wording,
        before: str,
        names: list[str],
        value: str,
        unit_tokens: int,
        most: int,
        draws: Draws,
    ):
        self.least = len(names)
        self.most = most
        self._wording = wording
        self._before = before
        self._names = names
        self._value = value
        self._unit_tokens = unit_tokens
        self._draws = draws

    def cost(self, units: int) -> float:
        return units * self._unit_tokens

    def render(self, units: int) -> Prompt:
        prompt = _ask(self._wording, _text(self._names, self._value, units, self._draws), self._value, self._names)
        return Prompt(self._before + prompt.context, prompt.question, prompt.gen_prefix, prompt.outputs)


def _names(letters: int, number: int, rng: Random) -> list[str]:
    names: list[str] = []
    while len(names) < number:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in (*names, "VAR"):
            names.append(name)
    return names


def _text(names: list[str], value: str, noise: int, draws: Draws) -> str:
    """The chain's lines, in order, at random places among `noise` lines of noise."""
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
    lines = [NOISE] * noise
    for place in sorted(draws("places").sample(range(noise), len(chain)), reverse=True):
        lines.insert(place, chain.pop())
    return "\n".join(lines)


def _ask(wording: Wording, text: str, value: str, names: list[str]) -> Prompt:
    return Prompt(
        context=wording.before + text + wording.gap,
        question=wording.question.format(query=value),
        gen_prefix=wording.answer.format(count=len(names), query=value),
        outputs=tuple(names),
    )
