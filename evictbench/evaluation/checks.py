"""The checks of a run's settings that need no model: names, numbers, words, folders."""

from __future__ import annotations

from dataclasses import dataclass

from evictbench import registry
from evictbench.errors import UserError, unknown
from evictbench.evaluation import protocol
from evictbench.evaluation.settings import CHOICES, RunSettings
from evictbench.generation.recency import SAME, RecencyWindow
from evictbench.numerals import check_count, check_seed, read_whole, shown
from evictbench.policy.budget import Budget
from evictbench.store import run_folder
from evictbench.suite.spec import Suite


@dataclass(frozen=True)
class Checked:
    """What the names and numbers of a run's settings stand for.

    budget: None for a policy that takes none. recency: the window by which the run counts how recent what is kept is.
    """

    chosen: registry.ChosenPolicy
    suite: Suite
    protocol: protocol.ChosenProtocol
    budget: Budget | None
    recency: RecencyWindow | None = None

    @property
    def context(self) -> int | None:
        """Tokens of a sample; None where the suite has no such notion."""
        return self.protocol.context

    @property
    def limit(self) -> int | None:
        """Samples per task; None for all."""
        return self.protocol.limit


def check(settings: RunSettings) -> Checked:
    """Look up every name and check every number, word and folder. UserError for the first that is wrong."""
    policies = registry.split_policies(settings.policy)
    if len(policies) > 1:
        raise UserError(f"A run takes one policy, and {' and '.join(policies)} are given: run them one by one.")
    chosen = registry.parse_policy(settings.policy)
    suite = registry.load_suite(settings.suite)
    _check_version(settings, suite)
    tasks = _tasks(settings, suite)
    budget = chosen.policy.read_budget(settings.budget)
    if settings.weights is not None and not chosen.policy.learned:
        raise UserError(f"{chosen.name} is not learned and takes no weights: leave out --weights {settings.weights}.")
    _check_options(settings)
    chosen_protocol = protocol.choose(settings, suite, tasks)
    checked = Checked(
        chosen=chosen,
        suite=suite,
        protocol=chosen_protocol,
        budget=None if budget is None else chosen_protocol.budget(budget),
        recency=_recency(settings),
    )
    _check_folders(settings)
    return checked


def _check_version(settings: RunSettings, suite: Suite) -> None:
    version = settings.suite_version
    if version is None or version in suite.versions:
        return
    if not suite.versions:
        raise UserError(f"{suite.name} has one version of its prompts: leave out --suite-version {version}.")
    raise unknown("version", version, suite.versions, f" of {suite.name}")


def _tasks(settings: RunSettings, suite: Suite) -> tuple[str, ...] | None:
    if settings.tasks is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in settings.tasks.split(",") if name.strip()))
    for name in names:
        if name not in suite.tasks:
            raise unknown("task", name, suite.tasks, f" of {suite.name}")
    if not names:
        raise UserError(f"--tasks names no task: {suite.name} has {', '.join(suite.tasks)}.")
    return names


def _check_options(settings: RunSettings) -> None:
    for name, words in CHOICES.items():
        if getattr(settings, name) not in words:
            raise unknown("value", getattr(settings, name), words, f" of --{name}")
    for name in ("limit", "context", "chunk", "batch_size", "repeats", "at"):
        check_count(name.replace("_", "-"), getattr(settings, name))
    check_seed(settings.seed)


def _recency(settings: RunSettings) -> RecencyWindow | None:
    """The window of --recency. UserError for what is none."""
    if settings.recency is None:
        return None
    if settings.recency == SAME:
        return RecencyWindow()
    try:
        length = read_whole(settings.recency)
    except ValueError:
        length = 0
    if length < 1:
        raise UserError(
            f"--recency takes the number of last tokens that the window has, or {SAME}, as many as a head keeps, and "
            f"not {shown(settings.recency)!r}."
        )
    return RecencyWindow(length)


def _check_folders(settings: RunSettings) -> None:
    if settings.data_dir is not None and not settings.data_dir.is_dir():
        raise UserError(f"There is no folder {settings.data_dir} (--data-dir).")
    haystack = settings.haystack
    if haystack is not None and not haystack.exists() and str(haystack) != "hub":
        raise UserError(f"There is no file {haystack} (--haystack).")
    run_folder.check_root(settings.out)
