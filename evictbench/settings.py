"""The options of a run, and the checks that need no model: names, numbers, words, folders."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from evictbench import protocol, records, registry
from evictbench.budget import Budget
from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.suite import Suite

Prefill = Literal["native", "dense", "bounded"]

CHOICES = {
    "question": ("default", "seen", "unseen"),
    "prefill": get_args(Prefill),
    "chat": ("auto", "on", "off"),
    "thinking": ("auto", "on", "off"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
}
"""Options that take one word of a few."""


@dataclass(frozen=True)
class Settings:
    """The options of `evictbench run`, as given. `command()` gives the command line back."""

    policy: str
    suite: str
    budget: str | None = None
    tasks: str | None = None
    context: int | None = None
    limit: int | None = None
    model: str = "smollm2"
    weights: str | None = None
    question: str = "default"
    prefill: Prefill = "native"
    chunk: int = 512
    max_new_tokens: str = "auto"
    chat: str = "auto"
    protocol: str = "default"
    repeats: int | None = None
    at: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    thinking: str = "auto"
    skip_overlong: bool = False
    batch_size: int = 8
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    data_dir: Path | None = None
    haystack: Path | None = None
    out: Path = Path("results/runs")
    trust_remote_code: bool = False

    def command(self, **changes: Any) -> str:
        """The command that runs these settings, with `changes` made to them; defaults are left out."""
        changed = replace(self, **changes)
        words = ["evictbench", "run"]
        for field in fields(self):
            value = getattr(changed, field.name)
            option = "--" + field.name.replace("_", "-")
            if value is True:
                words.append(option)
            elif value != field.default:
                words += [option, shlex.quote(str(value))]
        return " ".join(words)


@dataclass(frozen=True)
class Checked:
    """What the names and numbers of a run's settings stand for.

    context, limit: the suite's own where none is given.
    """

    chosen: registry.ChosenPolicy
    suite: Suite
    protocol: protocol.ChosenProtocol
    budget: Budget | None
    context: int | None
    limit: int | None


def check(settings: Settings) -> Checked:
    """Look up every name and check every number, word and folder; UserError for the first that cannot be."""
    several = registry.split_policies(settings.policy)
    if len(several) > 1:
        raise UserError(f"A run takes one policy, and {' and '.join(several)} are given: run them one by one.")
    chosen = registry.parse_policy(settings.policy)
    suite = registry.load_suite(settings.suite)
    tasks = _tasks(settings, suite)
    budget = _budget(settings, chosen)
    if settings.weights is not None and not chosen.policy.learned:
        raise UserError(f"{chosen.name} is not learned and takes no weights: leave out --weights {settings.weights}.")
    _check_options(settings)
    checked = Checked(
        chosen=chosen,
        suite=suite,
        protocol=protocol.choose(settings, suite, tasks),
        budget=budget,
        context=suite.default_context if settings.context is None else settings.context,
        limit=suite.default_limit if settings.limit is None else settings.limit,
    )
    _check_folders(settings)
    return checked


def _tasks(settings: Settings, suite: Suite) -> tuple[str, ...] | None:
    if settings.tasks is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in settings.tasks.split(",") if name.strip()))
    for name in names:
        if name not in suite.tasks:
            raise registry.unknown("task", name, suite.tasks, f" of {suite.name}")
    if not names:
        raise UserError(f"--tasks names no task: {suite.name} has {', '.join(suite.tasks)}.")
    return names


def _budget(settings: Settings, chosen: registry.ChosenPolicy) -> Budget | None:
    if not chosen.policy.needs_budget:
        if settings.budget is not None:
            raise UserError(f"{chosen.name} takes no budget: leave out --budget {settings.budget}.")
        return None
    if settings.budget is None:
        raise UserError(f"{chosen.name} needs a budget: --budget 256, or --budget 25%.")
    return Budget.parse(settings.budget)


def _check_options(settings: Settings) -> None:
    for name, words in CHOICES.items():
        if getattr(settings, name) not in words:
            raise registry.unknown("value", getattr(settings, name), words, f" of --{name}")
    for name in ("limit", "context", "chunk", "batch_size", "repeats", "at"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it has to be at least 1.")
    if settings.seed < 0:
        raise UserError(f"--seed is {settings.seed}; it has to be 0 or more.")
    number = settings.max_new_tokens
    if number not in ("auto", "card") and not (number.isascii() and number.isdigit() and int(number) > 0):
        raise UserError(f"--max-new-tokens takes a number above 0, card or auto, and not {number!r}.")


def _check_folders(settings: Settings) -> None:
    if settings.data_dir is not None and not settings.data_dir.is_dir():
        raise UserError(f"There is no folder {settings.data_dir} (--data-dir).")
    haystack = settings.haystack
    if haystack is not None and not haystack.exists() and str(haystack) != "hub":
        raise UserError(f"There is no file {haystack} (--haystack).")
    records.check_root(settings.out)
