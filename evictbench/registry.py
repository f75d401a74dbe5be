"""Policies and suites by name: found by entry point and loaded when asked for. A policy may also come from a file."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from evictbench.errors import UserError, one_line, unknown
from evictbench.numerals import MOST_SEED, read_real, read_whole, shown
from evictbench.suite.spec import Suite

if TYPE_CHECKING:
    from evictbench.policy.base import BasePolicy

POLICIES = "evictbench.policies"
SUITES = "evictbench.suites"
"""Entry-point groups of policy classes and of suites."""

SUITE_FAMILIES = "evictbench.suite_families"
"""Entry-point group of functions that make a suite: `--suite FAMILY:NAME` calls that of FAMILY with NAME."""

LM_EVAL = "lm-eval:"
"""The beginning of a suite's name that stands for a task of lm-eval's own."""

LM_EVAL_NAME = "lm-eval-"
"""The beginning of such a suite's name in results, where it is part of a folder's."""


@dataclass(frozen=True)
class ChosenPolicy:
    """The policy that `--policy` names. config: its settings. source: sha256 of the file it came from, if from one."""

    policy: type[BasePolicy]
    config: Any
    source: str | None = None

    @property
    def name(self) -> str:
        """The policy's name, without its settings."""
        return self.policy.name

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting with its value, defaults included."""
        return {field.name: getattr(self.config, field.name) for field in fields(self.config)}

    @property
    def changed_settings(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        default = self.policy.Config()
        return {name: value for name, value in self.settings.items() if value != getattr(default, name)}

    @property
    def label(self) -> str:
        """The name with the settings that differ from their defaults, as `--policy` takes it."""
        changed = ",".join(f"{name}={value}" for name, value in self.changed_settings.items())
        return f"{self.name}:{changed}" if changed else self.name


def names(group: str) -> list[str]:
    """The names in an entry-point group, in order. Nothing is loaded."""
    return list(_entries(group))


def load_policy(name: str) -> type[BasePolicy]:
    """The installed policy class of that name. Raises UserError if there is none, or it does not load."""
    return _policy_class(_load(POLICIES, "policy", name), name)


def load_suite(name: str) -> Suite:
    """The installed suite of that name; "lm-eval:gsm8k_cot" is made by the family "lm-eval". Raises UserError if there
    is none, or it does not load."""
    family, colon, member = name.partition(":")
    if colon and family in _entries(SUITE_FAMILIES):
        suite = _load(SUITE_FAMILIES, "suite family", family)(member)
    else:
        suite = _load(SUITES, "suite", name)
    if not isinstance(suite, Suite):
        raise UserError(f"The suite {name} is not an evictbench.suite.spec.Suite but a {type(suite).__name__}.")
    return suite


def parse_policy(text: str) -> ChosenPolicy:
    """Read "h2o", "h2o:group=max" or "path/to/my_policy.py:MyPolicy:window=8". A file is run: give this only what the
    user has typed. Raises UserError for an unknown policy or setting."""
    in_file = re.fullmatch(r"(?P<file>.+\.py):(?P<cls>\w+)(?::(?P<settings>.*))?", text)
    if in_file:
        policy, source = _from_file(Path(in_file["file"]).expanduser(), in_file["cls"])
        return ChosenPolicy(policy, _config(policy, in_file["settings"] or ""), source)
    if text.endswith(".py"):
        raise UserError(f"Name the class in the file too: --policy {text}:MyPolicy.")
    return parse_label(text)


def parse_label(label: str) -> ChosenPolicy:
    """Read the label of an installed policy ("h2o:group=max"), as results hold it. Unlike `parse_policy` it runs no
    file, whatever the label says."""
    name, _, settings = label.partition(":")
    policy = load_policy(name)
    return ChosenPolicy(policy, _config(policy, settings))


def recorded_policy(policy: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The label and the settings of a policy as a result holds it, in the words of the installed one.

    policy: a run's identity, with name, label, settings and source. Defaults change, and a label names only what is not
    the default, so that one label may have meant something else when a result was made. What is not installed, or was
    in a file, keeps its label. It runs no file.
    """
    label, settings = str(policy["label"]), policy["settings"]
    if policy.get("source") is not None or policy["name"] not in names(POLICIES):
        return label, settings
    try:
        cls = load_policy(policy["name"])
        named = cls.named_settings(settings)
        defaults = json.loads(json.dumps(vars(cls.Config()), default=str))
    except Exception:  # a policy's own code, or settings that it no longer has
        return label, settings
    if set(named) != set(defaults):
        return label, settings
    changed = ",".join(f"{name}={named[name]}" for name in defaults if named[name] != defaults[name])
    return (f"{policy['name']}:{changed}" if changed else str(policy["name"])), named


def reference_policy() -> ChosenPolicy:
    """The installed policy that takes no budget: the full cache, which the others are compared with. Raises UserError
    if there is none."""
    for name in names(POLICIES):
        with suppress(UserError):  # a policy that does not load is passed over
            policy = load_policy(name)
            if not policy.needs_budget:
                return ChosenPolicy(policy, policy.Config())
    raise UserError("No policy without a budget is installed, so there is nothing to compare with.")


def split_policies(text: str) -> list[str]:
    """Split a comma list of policies and keep settings together: in "tova,kvpop:label=max,window=32,h2o" a piece with
    "=" and no ":" before it belongs to the policy before it."""
    policies: list[str] = []
    for piece in text.split(","):
        if policies and "=" in piece and ":" not in piece.partition("=")[0]:
            policies[-1] += f",{piece.strip()}"
        else:
            policies.append(piece.strip())
    return policies


def read_settings(kind: type[Any], settings: str, owner: str, before: str) -> Any:
    """An instance of the dataclass `kind` from "window=8,label=max". Raises UserError for settings it does not take.

    owner, before: whose settings they are, and what precedes them on the command line, for sentences.
    """
    types = get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    chosen: dict[str, Any] = {}
    for piece in filter(None, (part.strip() for part in settings.split(","))):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if key not in known:
            raise unknown("setting", key, known, f" of {owner}")
        if not equals:
            raise UserError(f"The setting {key} of {owner} has no value: write {before}{key}=...")
        if key in chosen:
            raise UserError(f"The setting {key} of {owner} is given twice.")
        try:
            chosen[key] = _value(value, types[key])
        except ValueError as error:
            raise UserError(f"The setting {key} of {owner} takes {error}, and not {shown(value)!r}.") from None
    try:
        return kind(**chosen)
    except (TypeError, ValueError) as error:
        raise UserError(f"The settings of {owner} are not possible: {_typed(error)}.") from error


@cache
def _entries(group: str) -> dict[str, EntryPoint]:
    """Name to entry point. Raises UserError where two packages offer different ones under one name."""
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        if entries.setdefault(entry.name, entry).value != entry.value:
            raise UserError(
                f"Two packages offer {entry.name!r} in {group}: {entries[entry.name].value} and {entry.value}; "
                "uninstall one of them."
            )
    return entries


def _load(group: str, kind: str, name: str) -> Any:
    """What an entry point names. kind: "policy" or "suite", for sentences."""
    entries = _entries(group)
    if name not in entries:
        raise unknown(kind, name, entries)
    try:
        return entries[name].load()
    except (ImportError, AttributeError, SyntaxError) as error:
        raise UserError(f"The {kind} {name} cannot be loaded from {entries[name].value}: {_typed(error)}.") from error


def _from_file(path: Path, cls: str) -> tuple[type[BasePolicy], str]:
    """Run a Python file; the policy class of that name in it, and the file's sha256."""
    if not path.is_file():
        raise UserError(f"There is no policy file {path}.")
    source = hashlib.sha256(path.read_bytes()).hexdigest()
    module_name = f"evictbench_policy_{source[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"The policy file {path} cannot be loaded: {_typed(error)}.") from error
    classes = [name for name, value in vars(module).items() if isinstance(value, type)]
    if cls not in classes:
        raise unknown("class", cls, classes, f" in {path}")
    return _policy_class(vars(module)[cls], cls), source


def _policy_class(cls: Any, name: str) -> type[BasePolicy]:
    """`cls` as a policy class. Raises UserError if it is none, or lacks what every policy has to state."""
    from evictbench.policy.base import BasePolicy

    if not (isinstance(cls, type) and issubclass(cls, BasePolicy)):
        raise UserError(f"{name} is not a policy: it has to be a subclass of evictbench.policy.base.Policy.")
    missing = [needed for needed in ("name", "summary", "paper") if not isinstance(getattr(cls, needed, None), str)]
    if missing:
        raise UserError(f"The policy {cls.__name__} does not say its {' and '.join(missing)}.")
    if not is_dataclass(cls.Config):
        raise UserError(f"The Config of the policy {cls.name} is not a dataclass.")
    undefined = cls.undefined_methods()
    if undefined:
        raise UserError(f"The policy {cls.name} does not define {' and '.join(undefined)}.")
    return cls


def _config(policy: type[BasePolicy], settings: str) -> Any:
    return read_settings(policy.Config, settings, policy.name, f"{policy.name}:")


def _value(text: str, kind: Any) -> Any:
    """Read a setting as its field's type. Raises ValueError, whose message says what the setting takes."""
    if get_origin(kind) in (Union, UnionType):
        inner = [option for option in get_args(kind) if option is not NoneType]
        if text.lower() == "none" and NoneType in get_args(kind):
            return None
        return _value(text, inner[0])
    if get_origin(kind) is Literal:
        for option in get_args(kind):
            if str(option) == text:
                return option
        raise ValueError(f"one of {', '.join(map(str, get_args(kind)))}")
    if kind is bool:
        if text.lower() in ("true", "yes", "on", "1"):
            return True
        if text.lower() in ("false", "no", "off", "0"):
            return False
        raise ValueError("true or false")
    if kind in (int, float):
        return read_whole(text, MOST_SEED) if kind is int else read_real(text)
    return text


def _typed(error: BaseException) -> str:
    """An error's type and message in one line, without a full stop."""
    return f"{type(error).__name__}: {one_line(error)}".rstrip(":. ")
