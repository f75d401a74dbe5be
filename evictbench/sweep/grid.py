"""The cells of a sweep: every policy at every budget on every suite, and the full cache beside them; from words of the
command line, or from a file of the same words, with what is different in some cells.

    policies: [h2o, tova, "kvpop:label=max"]
    budgets: [128, 256, 25%]
    suites: [ruler, gsm8k]
    context: 1024                  # and every other option of `evictbench run`
    limit: 50
    overrides:
      - suite: gsm8k               # the cells that this names: policy, budget, suite; one of each or a list
        limit: 100
      - policy: kvpop
        weights: kvpop-mine
      - {policy: tova, budget: 128, leave_out: true}
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from evictbench import registry
from evictbench.errors import UserError
from evictbench.evaluation.settings import Settings
from evictbench.policy.budget import Budget
from evictbench.store import run_folder

AXES = {"policies": "policy", "budgets": "budget", "suites": "suite"}
"""The words that span the grid, and which setting of a cell each one gives."""

OPTIONS = tuple(field.name for field in fields(Settings) if field.name not in AXES.values())
"""Every other option of a run; common to all cells, or overridden in some."""

OVERRIDES, LEAVE_OUT = "overrides", "leave_out"


@dataclass(frozen=True)
class Override:
    """What is different in the cells that it names. policies, budgets, suites: those that it is for; empty: all."""

    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    suites: tuple[str, ...]
    options: Mapping[str, Any]
    leave_out: bool

    def names(self, settings: Settings) -> bool:
        """Whether a cell is meant. A policy is named with its settings, or without them for all of its cells."""
        policy = {settings.policy, registry.parse_policy(settings.policy).name}
        return (
            (not self.policies or not policy.isdisjoint(self.policies))
            and (not self.budgets or settings.budget in self.budgets)
            and (not self.suites or settings.suite in self.suites)
        )


@dataclass(frozen=True)
class Grid:
    """What a sweep runs over. options: of every cell, as `Settings` names them."""

    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    suites: tuple[str, ...]
    options: Mapping[str, Any]
    overrides: tuple[Override, ...] = ()


def read_file(path: Path) -> dict[str, Any]:
    """The words of a YAML file, their values of the types that the options have; UserError for what is not one."""
    import yaml

    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no words of a sweep: it begins with policies:, budgets: and suites:.")
    where = f" in {path}"
    words: dict[str, Any] = {}
    for name, value in content.items():
        word = str(name).replace("-", "_")
        if word == OVERRIDES:
            if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
                raise UserError(f"The overrides{where} are a list; each says which cells it is for, and what differs.")
            words[word] = tuple(_override(one, where) for one in value)
        elif word in AXES:
            words[word] = _list(value)
        elif word in OPTIONS:
            words[word] = _option(word, value, where)
        else:
            raise registry.unknown("word", str(name), [*AXES, *OPTIONS, OVERRIDES], where)
    return {word: value for word, value in words.items() if value is not None}


def grid_of(words: Mapping[str, Any]) -> Grid:
    """A grid from the command line's words, or a file's. Policies, budgets and suites: a list, or a comma list."""
    policies = _axis(words.get("policies"))
    budgets = tuple(str(Budget.parse(budget)) for budget in _axis(words.get("budgets")))
    suites = _axis(words.get("suites"))
    if not policies:
        raise UserError("A sweep needs policies: --policies h2o,tova (the full cache is added by itself).")
    if not suites:
        raise UserError("A sweep needs suites: --suites ruler,gsm8k.")
    options = {name: value for name, value in words.items() if name in OPTIONS}
    return Grid(policies, budgets, suites, options, tuple(words.get(OVERRIDES, ())))


def cells_of(grid: Grid) -> list[Settings]:
    """The settings of every cell, in the order in which they run: what takes no budget, then for every policy the
    middle budget, the ends, and what lies between, so that a coarse picture of all of it comes early."""
    chosen = {policy: registry.parse_policy(policy) for policy in (yardstick(), *grid.policies)}
    bounded = [policy for policy, found in chosen.items() if found.policy.needs_budget]
    free = [policy for policy in chosen if policy not in bounded]
    if bounded and not grid.budgets:
        raise UserError(f"{bounded[0]} needs budgets: --budgets 128,256 (or shares of the text: 10%,25%).")
    tasks = _tasks_by_suite(grid)
    weighed = _weighed(grid, chosen)
    cells = []
    used: set[int] = set()
    for budget in (None, *coarse(grid.budgets)):
        for suite in grid.suites:
            for policy in bounded if budget is not None else free:
                options = dict(grid.options) | {"tasks": tasks[suite], "weights": weighed.get(policy)}
                settings = Settings(policy=policy, suite=suite, budget=budget, **options)
                left_out = False
                for number, override in enumerate(grid.overrides):
                    if override.names(settings):
                        used.add(number)
                        options |= override.options
                        left_out |= override.leave_out
                if not left_out:
                    cells.append(Settings(policy=policy, suite=suite, budget=budget, **options))
    for number, _ in enumerate(grid.overrides, start=1):
        if number - 1 not in used:
            raise UserError(f"Override {number} names no cell of the sweep.")
    if not cells:
        raise UserError("Every cell of the sweep is left out.")
    return cells


def yardstick() -> str:
    """The policy that takes no budget, which every sweep includes."""
    for name in registry.names(registry.POLICIES):
        with suppress(UserError):  # a policy that does not load is no yardstick
            if not registry.load_policy(name).needs_budget:
                return name
    raise UserError("No policy without a budget is installed, so there is nothing to compare with.")


def coarse(budgets: Iterable[str]) -> list[str]:
    """Budgets, each once, in an order in which the first few already span all: the middle one, the least, the largest,
    then the middles of the gaps. Numbers of entries come before shares of the text."""

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
    for low, high in gaps:  # grows as it is gone through: wide gaps before narrow ones
        if high - low > 1:
            between = (low + high) // 2
            order.append(between)
            gaps += [(low, between), (between, high)]
    return [ordered[index] for index in dict.fromkeys(order)]


def _tasks_by_suite(grid: Grid) -> dict[str, str | None]:
    """Which of the tasks that are named are whose. Of several suites each takes those that it has."""
    named = grid.options.get("tasks")
    if named is None or len(grid.suites) == 1:
        return dict.fromkeys(grid.suites, named)
    names = [name.strip() for name in str(named).split(",") if name.strip()]
    known = {suite: registry.load_suite(suite).tasks for suite in grid.suites}
    for name in names:
        if not any(name in tasks for tasks in known.values()):
            raise registry.unknown("task", name, {task for tasks in known.values() for task in tasks})
    found = {suite: [name for name in names if name in tasks] for suite, tasks in known.items()}
    for suite, tasks in found.items():
        if not tasks:
            raise UserError(f"None of --tasks {named} is a task of {suite}: name one, or leave {suite} out.")
    return {suite: ",".join(tasks) for suite, tasks in found.items()}


def _weighed(grid: Grid, chosen: Mapping[str, registry.ChosenPolicy]) -> dict[str, str]:
    """Whose weights `weights` are: those of the one learned policy."""
    weights = grid.options.get("weights")
    if weights is None:
        return {}
    learned = [policy for policy, found in chosen.items() if found.policy.learned]
    if len(learned) != 1:
        which = f"{' and '.join(learned)} are learned" if learned else "none of the policies is learned"
        raise UserError(
            f"--weights {weights} are of one policy, and {which}: overrides in a file say which policy takes which."
        )
    return {learned[0]: str(weights)}


def _override(content: Mapping[Any, Any], where: str) -> Override:
    axes: dict[str, tuple[str, ...]] = dict.fromkeys(AXES, ())
    options: dict[str, Any] = {}
    leave_out = False
    for name, value in content.items():
        word = str(name).replace("-", "_")
        plural = next((axis for axis, single in AXES.items() if word in (axis, single)), None)
        if plural is not None:
            axes[plural] = tuple(_axis(_list(value)))
        elif word == LEAVE_OUT:
            leave_out = value is True
        elif word in OPTIONS:
            options[word] = _option(word, value, f" of an override{where}")
        else:
            raise registry.unknown("word", str(name), [*AXES.values(), *OPTIONS, LEAVE_OUT], f" of an override{where}")
    if not options and not leave_out:
        raise UserError(f"An override{where} changes nothing: it says which cells it is for, and what differs in them.")
    budgets = tuple(str(Budget.parse(budget)) for budget in axes["budgets"])
    return Override(axes["policies"], budgets, axes["suites"], options, leave_out)


def _axis(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of a list, or of a comma list, each once; a policy's settings stay with it."""
    given = [value] if isinstance(value, str) else list(value or ())
    split = [name for one in given for name in registry.split_policies(one) if name]
    return tuple(dict.fromkeys(split))


def _list(value: Any) -> tuple[str, ...]:
    return tuple(str(one).strip() for one in (value if isinstance(value, list) else [value]) if one is not None)


def _option(name: str, value: Any, where: str) -> Any:
    """A value of a file as its option has it. YAML reads `on` and `off` as true and false, and numbers as numbers."""
    kind = get_type_hints(Settings)[name]
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (option for option in get_args(kind) if option is not NoneType)
    if value is None:
        return None
    if isinstance(value, list) and name == "tasks":
        return ",".join(str(one) for one in value)
    plain = isinstance(value, str | int | float)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind not in (bool, int, float, Path) and plain:
        return ("on" if value else "off") if isinstance(value, bool) else str(value)
    takes = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}.get(kind, "one word")
    raise UserError(f"The word {name}{where} takes {takes}, and not {value!r}.")


SHARDS = ".shards"


def shard_folder(cell: Path, shard: int, shards: int) -> Path:
    """Where the samples of one shard (from 0) go; the cell's own folder where there is one shard."""
    return cell if shards == 1 else cell / SHARDS / f"{shard + 1}-of-{shards}"


def shard_folders(cell: Path) -> list[Path]:
    """The shards of a cell that are not merged yet, whatever number of shards they were of."""
    return sorted(folder for folder in (cell / SHARDS).glob("*-of-*") if folder.is_dir())


def merge(cell: Path, identity: Mapping[str, Any]) -> int:
    """Merge the shards of a cell that nobody is writing to; how many samples that added.

    Lines keep their session, which moves with them. Raises `records.Held` if another process writes to the cell.
    """
    for folder in shard_folders(cell):
        with suppress(OSError):  # only those that nobody has begun are empty
            folder.rmdir()
    found = shard_folders(cell)
    added = 0
    if not found:
        with suppress(OSError):
            (cell / SHARDS).rmdir()
        return 0
    with run_folder.open_run(cell, identity) as whole:
        for folder in found:
            with suppress(run_folder.Held), run_folder.open_run(folder, identity) as part:
                added += _add(whole, part)
                shutil.rmtree(folder)
        if not shard_folders(cell):
            shutil.rmtree(cell / SHARDS, ignore_errors=True)
    return added


def _add(whole: run_folder.RunFolder, part: run_folder.RunFolder) -> int:
    new = [line for key, line in part.samples.items() if key not in whole.samples]
    for number, session in enumerate(part.run["sessions"]):
        lines = [line for line in new if line["session"] == number]
        if lines:
            whole.start_session(session)
        for line in lines:
            whole.append(line)
    return len(new)
