"""Policies and suites by name: found by entry point, loaded only when asked for; policies also from a file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.policy.base import Policy
    from evictbench.suite.spec import Suite

POLICIES = "evictbench.policies"
SUITES = "evictbench.suites"

LM_EVAL = "lm-eval:"
"""What the name of a suite begins with that is any task of lm-eval's own."""


@dataclass(frozen=True)
class ChosenPolicy:
    """What `--policy` named: the class, its settings, and, where it came from a file, the hash of that file."""

    policy: type[Policy]
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
    def label(self) -> str:
        """The name with the settings that differ from their defaults, as `--policy` takes it."""
        default = self.policy.Config()
        changed = [f"{k}={v}" for k, v in self.settings.items() if v != getattr(default, k)]
        return f"{self.name}:{','.join(changed)}" if changed else self.name


def names(group: str) -> list[str]:
    """The names that a group holds, in order; nothing is loaded."""
    return list(_entries(group))


def load_policy(name: str) -> type[Policy]:
    """The policy class of that name."""
    return _policy_class(_load(POLICIES, "policy", name), name)


def load_suite(name: str) -> Suite:
    """The suite of that name; "lm-eval:gsm8k_cot" is a suite of that one task."""
    from evictbench.suite.spec import Suite

    if name.startswith(LM_EVAL):
        suite = importlib.import_module("evictbench.harness.model").suite_for(name.removeprefix(LM_EVAL))
    else:
        suite = _load(SUITES, "suite", name)
    if not isinstance(suite, Suite):
        raise UserError(f"The suite {name} is not an evictbench.suite.spec.Suite but a {type(suite).__name__}.")
    return suite


def parse_policy(text: str) -> ChosenPolicy:
    """Read "h2o", "h2o:group=max" or "path/to/my_policy.py:MyPolicy:window=8"."""
    in_file = re.fullmatch(r"(?P<file>.+\.py):(?P<cls>\w+)(?::(?P<settings>.*))?", text)
    if in_file:
        policy, source = _from_file(Path(in_file["file"]).expanduser(), in_file["cls"])
        return ChosenPolicy(policy, _config(policy, in_file["settings"] or ""), source)
    if text.endswith(".py"):
        raise UserError(f"Name the class in the file too: --policy {text}:MyPolicy.")
    name, _, settings = text.partition(":")
    policy = load_policy(name)
    return ChosenPolicy(policy, _config(policy, settings))


def split_policies(text: str) -> list[str]:
    """Split a comma list of policies and keep settings whole: in "tova,kvpop:label=max,window=32,h2o" a piece
    with "=" and no ":" before it belongs to the policy before it."""
    policies: list[str] = []
    for piece in text.split(","):
        if policies and "=" in piece and ":" not in piece.partition("=")[0]:
            policies[-1] += f",{piece.strip()}"
        else:
            policies.append(piece.strip())
    return policies


def unknown(kind: str, name: str, known: Iterable[str], where: str = "") -> UserError:
    """The sentence for a name that does not exist: the near matches, or all there are."""
    known = sorted(known)
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif known:
        hint = f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}."
    else:
        hint = "there is none."
    return UserError(f"Unknown {kind} {name!r}{where}: {hint}")


def read_settings(kind: type[Any], settings: str, owner: str, before: str) -> Any:
    """An instance of the dataclass `kind` from "window=8,label=max". For sentences: `owner` is whose settings they are,
    `before` what is written before them on the command line."""
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
            raise UserError(f"The setting {key} of {owner} takes {error}, and not {value!r}.") from None
    try:
        return kind(**chosen)
    except (TypeError, ValueError) as error:
        raise UserError(f"The settings of {owner} are not possible: {_one_line(error)}.") from error


@cache
def _entries(group: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        if found.setdefault(entry.name, entry).value != entry.value:
            raise UserError(
                f"Two packages offer {entry.name!r} in {group}: {found[entry.name].value} and {entry.value}; "
                "uninstall one of them."
            )
    return found


def _load(group: str, kind: str, name: str) -> Any:
    entries = _entries(group)
    if name not in entries:
        raise unknown(kind, name, entries)
    try:
        return entries[name].load()
    except (ImportError, AttributeError, SyntaxError) as error:
        raise UserError(
            f"The {kind} {name} cannot be loaded from {entries[name].value}: {_one_line(error)}."
        ) from error


def _from_file(path: Path, cls: str) -> tuple[type[Policy], str]:
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
        raise UserError(f"The policy file {path} cannot be loaded: {_one_line(error)}.") from error
    classes = [name for name, value in vars(module).items() if isinstance(value, type)]
    if cls not in classes:
        raise unknown("class", cls, classes, f" in {path}")
    return _policy_class(vars(module)[cls], cls), source


def _policy_class(cls: Any, name: str) -> type[Policy]:
    from evictbench.policy.base import Policy

    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise UserError(f"{name} is not a policy: it has to be a subclass of evictbench.policy.base.Policy.")
    missing = [needed for needed in ("name", "summary", "paper") if not isinstance(getattr(cls, needed, None), str)]
    if missing:
        raise UserError(f"The policy {cls.__name__} does not say its {' and '.join(missing)}.")
    if not is_dataclass(cls.Config):
        raise UserError(f"The Config of the policy {cls.name} is not a dataclass.")
    return cls


def _config(policy: type[Policy], settings: str) -> Any:
    return read_settings(policy.Config, settings, policy.name, f"{policy.name}:")


def _value(text: str, kind: Any) -> Any:
    """Read a setting as its field's type; ValueError says what is expected."""
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
        try:
            number = kind(text)
        except ValueError:
            raise ValueError("a whole number" if kind is int else "a number") from None
        if not math.isfinite(number):
            raise ValueError("a finite number")
        return number
    return text


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(":. ")
