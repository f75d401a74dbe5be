"""The protocol of a run: a suite's named preset, and what the options change of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.models import fine_tuned, load
from evictbench.models.model_files import CONFIG, read_object
from evictbench.numerals import MOST, read_whole, shown
from evictbench.policy.budget import Budget
from evictbench.suite.spec import GREEDY, Protocol, Question, Sampling, Suite

if TYPE_CHECKING:
    from evictbench.evaluation.settings import RunSettings

Differences = Mapping[str, tuple[Any, Any]]
"""What differs from the named protocol: name to the value that is used and the protocol's own value."""

RANGES = {
    "temperature": (0.0, 100.0, "0 (greedy) or more, and at most 100"),
    "top_p": (0.0, 1.0, "above 0 and up to 1"),
    "top_k": (0, 2**31, "0 (all tokens) or more"),
    "min_p": (0.0, 1.0, "between 0 and 1"),
}
"""Option to its least value, its largest value, and the two in words."""


@dataclass(frozen=True)
class AnswerLimit:
    """How many tokens an answer may have: what `--max-new-tokens` and the protocol say together.

    fixed: the number that was given; None for "auto" and "card".
    preset: the protocol's own limit, which stands in for those of the task cards; None where it has none.
    shrinks: "auto", which gives an answer less where the window has less room for it.
    """

    fixed: int | None
    preset: int | None
    shrinks: bool

    @property
    def common(self) -> int | None:
        """The limit of every task; None where each task's card decides."""
        return self.fixed or self.preset

    def by_card(self, task_limit: int) -> int:
        """The limit by the protocol. task_limit: the one on the task's card."""
        return self.preset or task_limit

    def wanted(self, task_limit: int) -> int:
        """The limit, whatever room the window has."""
        return self.fixed or self.by_card(task_limit)

    def within(self, room: int, task_limit: int) -> int:
        """The limit of an answer for which the window has `room` tokens; more than that where it must not shrink."""
        wanted = self.wanted(task_limit)
        return min(wanted, room) if self.shrinks else wanted


@dataclass(frozen=True)
class ChosenProtocol:
    """A named protocol with the changes that the options ask for, as far as they need no model.

    tasks: names to prepare; None for the suite's default set. context (tokens of a sample), limit (documents of a
    task): None where the suite has no such notion, or no such limit. thinking: as `--thinking` takes it; "auto" for
    the chat template's own default. system_prompt: None for none of ours. at: the k of pass@k and maj@k.
    """

    name: str
    preset: Protocol
    tasks: tuple[str, ...] | None
    question: Question
    context: int | None
    limit: int | None
    thinking: str
    system_prompt: str | None
    sampling: Sampling
    answer_limit: AnswerLimit
    repeats: int
    at: int
    differs: Differences

    def budget(self, given: Budget) -> Budget:
        """The budget that `--budget` stands for: where the protocol takes shares of the context, a number of entries.

        given: as it was read."""
        if self.preset.share_of == "prompt" or given.share is None or self.context is None:
            return given
        return Budget(tokens=given.at(self.context, 0))


def choose(settings: RunSettings, suite: Suite, tasks: tuple[str, ...] | None) -> ChosenProtocol:
    """Look up `--protocol` and make the changes that other options ask for. tasks: those of `--tasks`, checked."""
    known = suite.all_protocols
    if settings.protocol not in known:
        raise UserError(
            f"The suite {suite.name} has no protocol {shown(settings.protocol)!r}: there "
            f"{'is' if len(known) == 1 else 'are'} {', '.join(known)}."
        )
    preset = known[settings.protocol]
    own_sampling = preset.sampling
    if preset.model_sampling:
        own_sampling = preset.sampling_for(_known_as(settings.model))
    sampling = _sampling(settings, own_sampling, suite)
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
            name: (value, getattr(own_sampling, name))
            for name, value in asdict(sampling).items()
            if name == "temperature" or sampling != GREEDY  # temperature 0 says all there is to say
        },
        "repeats": (repeats, preset.repeats),
    }
    context = suite.default_context if preset.context is None else preset.context
    if settings.context is not None:
        if preset.context is not None:
            pairs["context"] = (settings.context, preset.context)
        context = settings.context
    limit = suite.default_limit if preset.limit is None else preset.limit
    differs = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    others = [name for name in tasks or () if name not in preset.tasks]
    if others:
        differs["tasks"] = (", ".join(others), ", ".join(preset.tasks))
    default = known.get("default", preset)
    return ChosenProtocol(
        name=settings.protocol,
        preset=preset,
        tasks=tasks or (None if preset.tasks == default.tasks else preset.tasks),
        question=question,
        context=context,
        limit=limit if settings.limit is None else settings.limit,
        thinking=_thinking(settings, preset),
        system_prompt=_system_prompt(settings, preset),
        sampling=sampling,
        answer_limit=_answer_limit(settings.max_new_tokens, preset),
        repeats=repeats,
        at=at,
        differs=differs,
    )


def in_words(sampling: Sampling) -> str:
    """ "greedy", or "temperature 0.6, top-p 0.95, top-k 20"."""
    if sampling == GREEDY:
        return "greedy"
    changed = {name: value for name, value in asdict(sampling).items() if value != getattr(GREEDY, name)}
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in changed.items())


def _answer_limit(given: str, preset: Protocol) -> AnswerLimit:
    if given in ("auto", "card"):
        return AnswerLimit(None, preset.max_new_tokens, shrinks=given == "auto")
    try:
        limit = read_whole(given)
    except ValueError:
        limit = 0
    if limit < 1:
        raise UserError(f"--max-new-tokens takes a number from 1 to {MOST:,}, card or auto, and not {shown(given)!r}.")
    return AnswerLimit(limit, preset.max_new_tokens, shrinks=False)


def _known_as(model: str) -> str:
    """The name by which a table of a protocol knows a model: that of the model it was fine-tuned from, if its config
    names one, and else its own. model: as `--model` takes it."""
    source = load.resolve(model)
    base = None if source.path is None else read_object(source.path / CONFIG).get(fine_tuned.FIELD)
    named = base.get("name") if isinstance(base, Mapping) else None
    return named if isinstance(named, str) else source.result_name


def _thinking(settings: RunSettings, preset: Protocol) -> str:
    if settings.thinking != "auto" or preset.thinking is None:
        return settings.thinking
    return "on" if preset.thinking else "off"


def _system_prompt(settings: RunSettings, preset: Protocol) -> str | None:
    given = preset.system_prompt if settings.system_prompt is None else settings.system_prompt
    return (given or "").strip() or None


def _sampling(settings: RunSettings, own: Sampling, suite: Suite) -> Sampling:
    """The protocol's sampling with the options' values. own: the protocol's for this model.

    At temperature 0 the others have no effect and are left out."""
    given = {name: value for name in asdict(GREEDY) if (value := getattr(settings, name)) is not None}
    for name, (low, high, range_in_words) in RANGES.items():
        value = given.get(name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise UserError(f"--{name.replace('_', '-')} is {value:g}; it has to be {range_in_words}.")
    if given.get("top_p") == 0:
        raise UserError("--top-p 0 leaves no token to draw: give a number above 0 and up to 1.")
    sampling = replace(own, **given)
    if sampling.temperature > 0:
        return sampling
    idle = [f"--{name.replace('_', '-')}" for name in given if name != "temperature"]
    if idle:
        where = "--temperature 0" if "temperature" in given else f"the protocol {settings.protocol} of {suite.name}"
        raise UserError(
            f"{where} is greedy, where {' and '.join(idle)} would do nothing: give a --temperature above 0."
        )
    return GREEDY


def _own_question(preset: Protocol, suite: Suite) -> Question:
    return "seen" if suite.context_field is None else preset.question or suite.question


def _question(settings: RunSettings, suite: Suite, own: Question) -> Question:
    if settings.question == "default":
        return own
    if suite.context_field is None and settings.question == "unseen":
        raise UserError(f"The tasks of {suite.name} have no question apart from their text: it is seen.")
    return "seen" if settings.question == "seen" else "unseen"
