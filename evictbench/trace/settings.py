"""The options of a trace, and the checks that need no model: names, numbers, words, folders."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from evictbench import registry
from evictbench.errors import UserError
from evictbench.evaluation.settings import CHOICES, Prefill
from evictbench.models import random_models
from evictbench.policy.budget import Budget
from evictbench.trace.store import check_folder

ROOT = Path("results/traces")


@dataclass(frozen=True)
class Settings:
    """The options of `evictbench trace`, as given. budget, contexts and batch_size are comma lists; weights is one of
    POLICY=FOLDER."""

    policies: str
    contexts: str
    budget: str | None = None
    new_tokens: int = 128
    batch_size: str = "1"
    model: str = "smollm2"
    weights: str | None = None
    prefill: Prefill = "native"
    chunk: int = 512
    retention: int | None = None
    text: Path | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    out: Path | None = None
    trust_remote_code: bool = False

    @property
    def folder(self) -> Path:
        """Where the trace lies: --out, or one of its own for these settings."""
        if self.out is not None:
            return self.out
        words = {field.name: str(getattr(self, field.name)) for field in fields(self) if field.name != "out"}
        mark = hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:8]
        model = re.sub(r"[^\w.-]", "-", Path(self.model).name)
        return ROOT / f"{model}-{mark}"


class Cell(NamedTuple):
    """One policy (its label) at one budget, length of prompt and number of rows."""

    policy: str
    budget: str | None
    context: int
    rows: int

    def __str__(self) -> str:
        budget = f" {self.budget}" if self.budget else ""
        return f"{self.policy}{budget}, context {self.context:,}, {self.rows} row{'s' if self.rows > 1 else ''}"


@dataclass(frozen=True)
class Checked:
    """What the names and numbers stand for.

    chosen: by label, the yardstick first. cells: in the order in which they run, so that policies which are compared
    stand side by side. weights: the folders given, by the name of their policy.
    """

    chosen: Mapping[str, registry.ChosenPolicy]
    cells: Sequence[Cell]
    weights: Mapping[str, str]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(cell.context for cell in self.cells)

    @property
    def fewest(self) -> int:
        """Rows of the smallest cells."""
        return min(cell.rows for cell in self.cells)


def check(settings: Settings) -> Checked:
    """Look up every name and check every number, word and folder; UserError for the first that cannot be."""
    chosen = _policies(settings)
    budgets = _budgets(settings, chosen)
    contexts = _numbers(settings.contexts, "contexts")
    rows = _numbers(settings.batch_size, "batch-size")
    for name in ("prefill", "dtype"):
        if getattr(settings, name) not in CHOICES[name]:
            raise registry.unknown("value", getattr(settings, name), CHOICES[name], f" of --{name}")
    for name in ("new_tokens", "chunk", "retention"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it has to be at least 1.")
    if settings.seed < 0:
        raise UserError(f"--seed is {settings.seed}; it has to be 0 or more.")
    if random_models.is_shape(settings.model):
        random_models.named(settings.model)
        if settings.text is not None:
            raise UserError(f"{settings.model} has no tokenizer, which --text needs: leave it out, or name a model.")
    if settings.text is not None and not settings.text.is_file():
        raise UserError(f"There is no file {settings.text} (--text).")
    check_folder(settings.folder)
    cells = [
        Cell(label, budget, context, count)
        for context in contexts
        for count in rows
        for label, one in chosen.items()
        for budget in (budgets if one.policy.needs_budget else (None,))
    ]
    return Checked(chosen, cells, _weights(settings, chosen))


def _policies(settings: Settings) -> dict[str, registry.ChosenPolicy]:
    named = [registry.parse_policy(text) for text in registry.split_policies(settings.policies) if text]
    if not named:
        raise UserError("--policies names no policy: evictbench list policies shows what there is.")
    for one in named:
        if one.policy.foresees:
            raise UserError(
                f"{one.name} knows what comes from a dense run made before, so that its time and memory say nothing: "
                "leave it out of --policies."
            )
    if all(one.policy.needs_budget for one in named):
        named.insert(0, _yardstick())
    named.sort(key=lambda one: one.policy.needs_budget)
    return {one.label: one for one in named}


def _yardstick() -> registry.ChosenPolicy:
    """The policy that evicts nothing."""
    for name in registry.names(registry.POLICIES):
        with suppress(UserError):  # a policy that does not load is no yardstick
            found = registry.parse_policy(name)
            if not found.policy.needs_budget:
                return found
    raise UserError("No policy that evicts nothing is installed, to measure the others against.")


def _budgets(settings: Settings, chosen: Mapping[str, registry.ChosenPolicy]) -> list[str]:
    needing = [one.name for one in chosen.values() if one.policy.needs_budget]
    if settings.budget is None:
        if needing:
            raise UserError(f"{needing[0]} needs a budget: --budget 256, or --budget 25%.")
        return []
    budgets = list(dict.fromkeys(str(Budget.parse(word)) for word in settings.budget.split(",")))
    if not needing:
        raise UserError(f"No policy of --policies takes a budget: leave out --budget {settings.budget}.")
    return budgets


def _numbers(words: str, option: str) -> list[int]:
    """A comma list of whole numbers, ascending."""
    found = set()
    for word in words.split(","):
        text = word.strip()
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise UserError(f"--{option} takes whole numbers above 0, separated by commas, and not {text!r}.")
        found.add(int(text))
    return sorted(found)


def _weights(settings: Settings, chosen: Mapping[str, registry.ChosenPolicy]) -> dict[str, str]:
    learned = {one.name for one in chosen.values() if one.policy.learned}
    found: dict[str, str] = {}
    for pair in (settings.weights or "").split(","):
        if not pair.strip():
            continue
        name, equals, where = (part.strip() for part in pair.partition("="))
        if not equals or not where:
            raise UserError(f"--weights takes POLICY=FOLDER, several separated by commas, and not {pair!r}.")
        if name not in learned:
            raise registry.unknown("learned policy", name, learned, " in --policies")
        found[name] = where
    return found
