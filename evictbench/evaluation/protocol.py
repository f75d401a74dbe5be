"""The protocol of a run: a suite's named preset, and what the options change of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from evictbench import registry
from evictbench.errors import UserError
from evictbench.suite.spec import GREEDY, Protocol, Sampling

if TYPE_CHECKING:
    from evictbench.evaluation.settings import Settings
    from evictbench.suite.spec import Question, Suite

Differences = Mapping[str, tuple[Any, Any]]
"""What differs from the named protocol: name to the value that is used and the protocol's own."""


@dataclass(frozen=True)
class ChosenProtocol:
    """A named protocol with the options' changes made, as far as they need no model.

    tasks: names to prepare, None for the suite's default set. at: the k of pass@k and maj@k.
    """

    name: str
    preset: Protocol
    tasks: tuple[str, ...] | None
    question: Question
    sampling: Sampling
    repeats: int
    at: int
    differs: Differences


def choose(settings: Settings, suite: Suite, tasks: tuple[str, ...] | None) -> ChosenProtocol:
    """Look up `--protocol` and make the changes that other options ask for; `tasks` are those of --tasks, checked."""
    known = suite.protocols or {"default": Protocol(source="", tasks=suite.tasks)}
    if settings.protocol not in known:
        raise registry.unknown("protocol", settings.protocol, known, f" of {suite.name}")
    preset = known[settings.protocol]
    sampling = _sampling(settings, preset, suite)
    repeats = preset.repeats if settings.repeats is None else settings.repeats
    at = repeats if settings.at is None else settings.at
    if at > repeats:
        raise UserError(f"--at is {at}, and there are {repeats} answers per document: raise --repeats, or lower --at.")
    if repeats > 1 and sampling == GREEDY:
        raise UserError(
            f"Greedy answers are the same every time, so {repeats} repeats say no more than one: use --repeats 1, or "
            "sample with --temperature."
        )
    own_question = _own_question(preset, suite)
    question = _question(settings, suite, own_question)
    pairs: dict[str, tuple[Any, Any]] = {
        "question": (question, own_question),
        **{
            name: (value, getattr(preset.sampling, name))
            for name, value in asdict(sampling).items()
            if name == "temperature" or sampling != GREEDY  # of which there is nothing more to say
        },
        "repeats": (repeats, preset.repeats),
    }
    differs = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    others = [name for name in tasks or () if name not in preset.tasks]
    if others:
        differs["tasks"] = (", ".join(others), ", ".join(preset.tasks))
    default = known.get("default", preset)
    chosen = tasks or (None if preset.tasks == default.tasks else preset.tasks)
    return ChosenProtocol(settings.protocol, preset, chosen, question, sampling, repeats, at, differs)


def in_words(sampling: Sampling) -> str:
    """ "greedy", or "temperature 0.6, top-p 0.95, top-k 20"."""
    if sampling == GREEDY:
        return "greedy"
    changed = {name: value for name, value in asdict(sampling).items() if value != getattr(GREEDY, name)}
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in changed.items())


def _sampling(settings: Settings, preset: Protocol, suite: Suite) -> Sampling:
    """The protocol's sampling with the options' values; at temperature 0 the rest says nothing and is left out."""
    given = {name: value for name in asdict(GREEDY) if (value := getattr(settings, name)) is not None}
    for name, (low, high, words) in RANGES.items():
        value = given.get(name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise UserError(f"--{name.replace('_', '-')} is {value:g}; it has to be {words}.")
    if given.get("top_p") == 0:
        raise UserError("--top-p 0 leaves no token to draw: give a number above 0 and up to 1.")
    sampling = replace(preset.sampling, **given)
    if sampling.temperature > 0:
        return sampling
    idle = [f"--{name.replace('_', '-')}" for name in given if name != "temperature"]
    if idle:
        where = "--temperature 0" if "temperature" in given else f"the protocol {settings.protocol} of {suite.name}"
        raise UserError(
            f"{where} is greedy, where {' and '.join(idle)} would do nothing: give a --temperature above 0."
        )
    return GREEDY


RANGES = {
    "temperature": (0.0, 100.0, "0 (greedy) or more, and at most 100"),
    "top_p": (0.0, 1.0, "above 0 and up to 1"),
    "top_k": (0, 2**31, "0 (all tokens) or more"),
    "min_p": (0.0, 1.0, "between 0 and 1"),
}
"""Option to its least and largest value, and the two in words."""


def _own_question(preset: Protocol, suite: Suite) -> Question:
    return "seen" if suite.context_field is None else preset.question or suite.question


def _question(settings: Settings, suite: Suite, own: Question) -> Question:
    if settings.question == "default":
        return own
    if suite.context_field is None and settings.question == "unseen":
        raise UserError(f"The tasks of {suite.name} have no question apart from their text: it is seen.")
    return "seen" if settings.question == "seen" else "unseen"
