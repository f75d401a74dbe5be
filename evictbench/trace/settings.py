"""The options of a trace, and the checks that need no model: names, numbers, choices, folders."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from evictbench import registry
from evictbench.errors import UserError, unknown
from evictbench.evaluation.settings import CHOICES
from evictbench.models import bundled, random_models
from evictbench.numerals import MOST, check_count, check_seed, read_whole, shown
from evictbench.policy.base import Policy
from evictbench.policy.budget import Budget
from evictbench.policy.declarations import Prefill
from evictbench.trace.store import check_folder

ROOT = Path("results/traces")


@dataclass(frozen=True)
class TraceSettings:
    """The options of `evictbench trace`, as given.

    policies, budget, contexts and batch_size are comma lists; weights is a comma list of POLICY=FOLDER.
    """

    policies: str
    contexts: str
    budget: str | None = None
    new_tokens: int = 128
    batch_size: str = "1"
    model: str = bundled.NAME
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
        """The folder of the trace: --out, or one named after the settings."""
        if self.out is not None:
            return self.out
        values = {field.name: str(getattr(self, field.name)) for field in fields(self) if field.name != "out"}
        suffix = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
        model = re.sub(r"[^\w.-]", "-", Path(self.model).name)
        return ROOT / f"{model}-{suffix}"


class TraceCell(NamedTuple):
    """One policy (by its label) at one budget, context (tokens of the prompt) and number of rows decoded together."""

    policy: str
    budget: str | None
    context: int
    rows: int

    def __str__(self) -> str:
        budget = f" {self.budget}" if self.budget else ""
        return f"{self.policy}{budget}, context {self.context:,}, {self.rows} row{'s' if self.rows > 1 else ''}"


@dataclass(frozen=True)
class Checked:
    """The settings, looked up and parsed.

    chosen: the policies by label, the baseline first. cells: in the order in which they run, policies that are compared
    next to each other. weights: the folders given, by the name of their policy.
    """

    chosen: Mapping[str, registry.ChosenPolicy]
    cells: Sequence[TraceCell]
    weights: Mapping[str, str]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(cell.context for cell in self.cells)

    @property
    def fewest(self) -> int:
        """Rows of the smallest cells."""
        return min(cell.rows for cell in self.cells)


def check(settings: TraceSettings) -> Checked:
    """Look up every name and check every number, choice and folder; raises UserError for the first that is wrong."""
    chosen = _policies(settings)
    budgets = _budgets(settings, chosen)
    contexts = _numbers(settings.contexts, "contexts")
    rows = _numbers(settings.batch_size, "batch-size")
    for name in ("prefill", "dtype"):
        if getattr(settings, name) not in CHOICES[name]:
            raise unknown("value", getattr(settings, name), CHOICES[name], f" of --{name}")
    for name in ("new_tokens", "chunk", "retention"):
        check_count(name.replace("_", "-"), getattr(settings, name))
    check_seed(settings.seed)
    if random_models.is_shape(settings.model):
        random_models.find_shape(settings.model)
        if settings.text is not None:
            raise UserError(f"{settings.model} has no tokenizer, which --text needs: leave it out, or name a model.")
    if settings.text is not None and not settings.text.is_file():
        raise UserError(f"There is no file {settings.text} (--text).")
    check_folder(settings.folder)
    cells = [
        TraceCell(label, budget, context, count)
        for context in contexts
        for count in rows
        for label, choice in chosen.items()
        for budget in (budgets if choice.policy.needs_budget else (None,))
    ]
    return Checked(chosen, cells, _weights(settings, chosen))


def _policies(settings: TraceSettings) -> dict[str, registry.ChosenPolicy]:
    policies = [registry.parse_policy(text) for text in registry.split_policies(settings.policies) if text]
    if not policies:
        raise UserError("--policies names no policy: evictbench list policies shows what there is.")
    for chosen in policies:
        if issubclass(chosen.policy, Policy) and chosen.policy.needs_labels:
            raise UserError(
                f"{chosen.name} knows what comes from a dense run made before, so that its time and memory say "
                "nothing: leave it out of --policies."
            )
    if all(chosen.policy.needs_budget for chosen in policies):
        policies.insert(0, registry.reference_policy())
    policies.sort(key=lambda chosen: chosen.policy.needs_budget)
    return {chosen.label: chosen for chosen in policies}


def _budgets(settings: TraceSettings, chosen: Mapping[str, registry.ChosenPolicy]) -> list[str]:
    needing = [choice.policy for choice in chosen.values() if choice.policy.needs_budget]
    if settings.budget is None:
        for policy in needing:
            policy.read_budget(None)  # raises: it needs a budget
        return []
    budgets = list(dict.fromkeys(str(Budget.parse(text)) for text in settings.budget.split(",")))
    if not needing:
        raise UserError(f"No policy of --policies takes a budget: leave out --budget {settings.budget}.")
    return budgets


def _numbers(value: str, option: str) -> list[int]:
    """The whole numbers of a comma list, ascending. option: its name, for the message."""
    numbers = set()
    for part in value.split(","):
        text = part.strip()
        try:
            number = read_whole(text)
        except ValueError:
            number = 0
        if number < 1:
            raise UserError(
                f"--{option} takes whole numbers from 1 to {MOST:,}, separated by commas, and not {shown(text)!r}."
            )
        numbers.add(number)
    return sorted(numbers)


def _weights(settings: TraceSettings, chosen: Mapping[str, registry.ChosenPolicy]) -> dict[str, str]:
    learned = {choice.name for choice in chosen.values() if choice.policy.learned}
    folders: dict[str, str] = {}
    for pair in (settings.weights or "").split(","):
        if not pair.strip():
            continue
        name, equals, where = (part.strip() for part in pair.partition("="))
        if not equals or not where:
            raise UserError(f"--weights takes POLICY=FOLDER, several separated by commas, and not {pair!r}.")
        if name not in learned:
            raise unknown("learned policy", name, learned, " in --policies")
        folders[name] = where
    return folders
