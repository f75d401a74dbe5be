"""The cells of a sweep: every policy at every budget on every suite, and the full cache beside them. They come from the
options of the command line, or from a file of the same options with overrides for some cells.

    policies: [h2o, tova, "kvpop:label=max"]
    budgets: [128, 256, 25%]
    suites: [ruler, gsm8k]
    context: 1024                  # and every other option of `evictbench run`
    limit: 50
    overrides:
      - suite: gsm8k               # the cells that this names: policy, budget, suite; one of each or a list
        limit: 100
      - policy: kvpop
        weights: kvpop-mine        # several trainings, comma-separated or as a list, are cells of their own
      - {policy: tova, budget: 128, leave_out: true}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from evictbench import registry, yaml_file
from evictbench.errors import UserError, unknown
from evictbench.evaluation.settings import RunSettings
from evictbench.numerals import MOST_SEED, shown
from evictbench.policy.budget import Budget

AXES = {"policies": "policy", "budgets": "budget", "suites": "suite"}
"""The options that span the grid, and the setting of a cell that each one gives."""

OPTIONS = tuple(field.name for field in fields(RunSettings) if field.name not in AXES.values())
"""Every other option of a run: the same for all cells, unless an override changes it."""

OVERRIDES, LEAVE_OUT = "overrides", "leave_out"
"""Keys of a sweep's file: the list of overrides, and the mark of an override that drops its cells."""


@dataclass(frozen=True)
class Override:
    """A change of some cells. policies, budgets, suites: the cells that it is for; an empty one matches all.

    options: settings to change. leave_out: drop the cells.
    """

    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    suites: tuple[str, ...]
    options: Mapping[str, Any]
    leave_out: bool

    def matches(self, settings: RunSettings) -> bool:
        """Whether the override is for a cell. A policy named without settings matches all cells of that policy."""
        policy = {settings.policy, registry.parse_policy(settings.policy).name}
        return (
            (not self.policies or not policy.isdisjoint(self.policies))
            and (not self.budgets or settings.budget in self.budgets)
            and (not self.suites or settings.suite in self.suites)
        )


@dataclass(frozen=True)
class Grid:
    """The axes of a sweep. options: settings of every cell, by their names in `RunSettings`."""

    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    suites: tuple[str, ...]
    options: Mapping[str, Any]
    overrides: tuple[Override, ...] = ()


def read_sweep_file(path: Path) -> dict[str, Any]:
    """The options in a YAML file, with values of the types that they have in `RunSettings`.

    Raises UserError for a file that is no YAML, and for unknown options and values.
    """
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    content = yaml_file.load(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no words of a sweep: it begins with policies:, budgets: and suites:.")
    where = f" in {path}"
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in options:
            raise UserError(f"The word {name}{where} is given twice, once with - and once with _.")
        if name == OVERRIDES:
            if not isinstance(value, list) or not all(isinstance(override, dict) for override in value):
                raise UserError(f"The overrides{where} are a list; each says which cells it is for, and what differs.")
            options[name] = tuple(_override(override, where) for override in value)
        elif name in AXES:
            options[name] = _list(value)
        elif name in OPTIONS:
            options[name] = _option(name, value, where)
        else:
            raise unknown("word", str(key), [*AXES, *OPTIONS, OVERRIDES], where)
    return {name: value for name, value in options.items() if value is not None}


def parse_grid(options: Mapping[str, Any]) -> Grid:
    """A grid from the options of the command line or a file. Each axis is a list of names, or a comma list."""
    policies = _axis(options.get("policies"))
    budgets = tuple(str(Budget.parse(budget)) for budget in _axis(options.get("budgets")))
    suites = _axis(options.get("suites"))
    if not policies:
        raise UserError("A sweep needs policies: --policies h2o,tova (the full cache is added by itself).")
    if not suites:
        raise UserError("A sweep needs suites: --suites ruler,gsm8k.")
    common = {name: value for name, value in options.items() if name in OPTIONS}
    return Grid(policies, budgets, suites, common, tuple(options.get(OVERRIDES, ())))


def grid_cells(grid: Grid) -> list[RunSettings]:
    """The settings of every cell, in the order in which they run.

    Policies without a budget come first, then all policies at the middle budget, the least, the largest, and those
    between, so that a coarse picture of the whole comes early.
    """
    chosen = {name: registry.parse_policy(name) for name in (registry.reference_policy().name, *grid.policies)}
    bounded = [name for name, policy in chosen.items() if policy.policy.needs_budget]
    free = [name for name in chosen if name not in bounded]
    if bounded and not grid.budgets:
        raise UserError(f"{bounded[0]} needs budgets: --budgets 128,256 (or shares of the text: 10%,25%).")
    tasks = _tasks_by_suite(grid)
    weights = _weights_by_policy(grid, chosen)
    cells = []
    used: set[int] = set()
    for budget in (None, *coarse_to_fine(grid.budgets)):
        for suite in grid.suites:
            for policy in bounded if budget is not None else free:
                options = dict(grid.options) | {"tasks": tasks[suite], "weights": weights.get(policy)}
                settings = RunSettings(policy=policy, suite=suite, budget=budget, **options)
                left_out = False
                for number, override in enumerate(grid.overrides):
                    if override.matches(settings):
                        used.add(number)
                        options |= override.options
                        left_out |= override.leave_out
                for training in [] if left_out else trainings(options["weights"]):
                    cells.append(RunSettings(policy, suite, budget, **options | {"weights": training}))
    for number, _ in enumerate(grid.overrides, start=1):
        if number - 1 not in used:
            raise UserError(f"Override {number} names no cell of the sweep.")
    if not cells:
        raise UserError("Every cell of the sweep is left out.")
    return cells


def trainings(weights: str | None) -> list[str | None]:
    """The weights that a comma list names, each of which has a cell of its own; None for a policy's own weights."""
    if weights is None:
        return [None]
    named = list(dict.fromkeys(word.strip() for word in weights.split(",") if word.strip()))
    if not named:
        raise UserError(f"--weights {weights} names no weights.")
    return list(named)


def coarse_to_fine(budgets: Iterable[str]) -> list[str]:
    """Budgets, each once, in an order whose first few already span all of them: the middle one, the least, the largest,
    then the middles of the gaps. Shares of the text count as larger than numbers of entries."""

    def size(budget: str) -> tuple[bool, float]:
        parsed = Budget.parse(budget)
        return parsed.tokens is None, parsed.tokens if parsed.tokens is not None else parsed.share or 0.0

    ordered = sorted(dict.fromkeys(budgets), key=size)
    if not ordered:
        return []
    last = len(ordered) - 1
    middle = len(ordered) // 2
    order = [middle, 0, last]
    gaps = [(0, middle), (middle, last)]
    for low, high in gaps:  # grows during the loop: wide gaps come before narrow ones
        if high - low > 1:
            between = (low + high) // 2
            order.append(between)
            gaps += [(low, between), (between, high)]
    return [ordered[index] for index in dict.fromkeys(order)]


def _tasks_by_suite(grid: Grid) -> dict[str, str | None]:
    """Suite to the tasks that it runs, as a comma list; of the tasks that are named, each suite takes those it has."""
    named = grid.options.get("tasks")
    if named is None or len(grid.suites) == 1:
        return dict.fromkeys(grid.suites, named)
    names = [name.strip() for name in str(named).split(",") if name.strip()]
    known = {suite: registry.load_suite(suite).tasks for suite in grid.suites}
    for name in names:
        if not any(name in tasks for tasks in known.values()):
            raise unknown("task", name, {task for tasks in known.values() for task in tasks})
    by_suite = {suite: [name for name in names if name in tasks] for suite, tasks in known.items()}
    for suite, tasks in by_suite.items():
        if not tasks:
            raise UserError(f"None of --tasks {named} is a task of {suite}: name one, or leave {suite} out.")
    return {suite: ",".join(tasks) for suite, tasks in by_suite.items()}


def _weights_by_policy(grid: Grid, chosen: Mapping[str, registry.ChosenPolicy]) -> dict[str, str]:
    """The learned policy to the weights that are given. Raises UserError unless there is exactly one such policy."""
    weights = grid.options.get("weights")
    if weights is None:
        return {}
    learned = [name for name, policy in chosen.items() if policy.policy.learned]
    if len(learned) != 1:
        which = f"{' and '.join(learned)} are learned" if learned else "none of the policies is learned"
        raise UserError(
            f"--weights {weights} are of one policy, and {which}: overrides in a file say which policy takes which."
        )
    return {learned[0]: str(weights)}


def _override(content: Mapping[Any, Any], where: str) -> Override:
    """One override of a file. where: the file, for sentences."""
    axes: dict[str, tuple[str, ...]] = dict.fromkeys(AXES, ())
    options: dict[str, Any] = {}
    leave_out = False
    given: set[str] = set()
    for key, value in content.items():
        name = str(key).replace("-", "_")
        meant = AXES.get(name, name)
        if meant in given:
            raise UserError(f"The word {meant} of an override{where} is given twice, in two spellings.")
        given.add(meant)
        plural = next((axis for axis, single in AXES.items() if name in (axis, single)), None)
        if plural is not None:
            axes[plural] = tuple(_axis(_list(value)))
        elif name == LEAVE_OUT:
            leave_out = value is True
        elif name in OPTIONS:
            options[name] = _option(name, value, f" of an override{where}")
        else:
            raise unknown("word", str(key), [*AXES.values(), *OPTIONS, LEAVE_OUT], f" of an override{where}")
    if not options and not leave_out:
        raise UserError(f"An override{where} changes nothing: it says which cells it is for, and what differs in them.")
    budgets = tuple(str(Budget.parse(budget)) for budget in axes["budgets"])
    return Override(axes["policies"], budgets, axes["suites"], options, leave_out)


def _axis(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names in a list or a comma list, each once; a policy's settings stay with it."""
    parts = [value] if isinstance(value, str) else list(value or ())
    names = [name for part in parts for name in registry.split_policies(part) if name]
    return tuple(dict.fromkeys(names))


def _list(value: Any) -> tuple[str, ...]:
    """The texts of a list, or of one value, without those that are missing."""
    values = value if isinstance(value, list) else [value]
    return tuple(str(item).strip() for item in values if item is not None)


def _option(name: str, value: Any, where: str) -> Any:
    """A value of a file in its option's type. YAML reads `on` and `off` as booleans, and digits as numbers."""
    kind = get_type_hints(RunSettings)[name]
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (option for option in get_args(kind) if option is not NoneType)
    if value is None:
        return None
    if isinstance(value, list) and name in ("tasks", "weights"):
        return ",".join(str(item) for item in value)
    plain = isinstance(value, str | int | float)
    if isinstance(value, int) and abs(value) > MOST_SEED:
        raise UserError(f"The word {name}{where} takes no number as large as {shown(value)}.")
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str) and "\0" not in value:
        return Path(value)
    if kind not in (bool, int, float, Path) and plain:
        return ("on" if value else "off") if isinstance(value, bool) else str(value)
    takes = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}.get(kind, "one word")
    raise UserError(f"The word {name}{where} takes {takes}, and not {value!r}.")
