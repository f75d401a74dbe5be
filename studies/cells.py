"""Many cells on the same texts, text by text, so that all of them share what is computed once a text.

Every cell is an ordinary run with an ordinary folder: it resumes, other processes may work on other cells, and
`evictbench run` finds and extends it. Its times are not those of an ordinary run (see `replay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from evictbench import registry
from evictbench.errors import UserError
from evictbench.evaluation.plan import RunPlan, make_plan
from evictbench.evaluation.run import TextGenerator, load_generator, load_model, run_plan
from evictbench.evaluation.settings import RunSettings
from evictbench.generation.generator import Generator
from evictbench.store import run_folder
from evictbench.suites.fidelity.generator import TeacherForced
from studies.replay import DenseRuns, ReplayingRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Say = Callable[[str], None]


@dataclass
class Cell:
    """A policy at a budget, and its plan.

    name: as the command names it (`kvpop:label=max`, or `kvpop@folder` for weights in a folder). busy: whether another
    process is writing to it.
    """

    name: str
    budget: str | None
    plan: RunPlan
    busy: bool = False

    @property
    def title(self) -> str:
        """The policy and the budget."""
        return self.name if self.budget is None else f"{self.name} at {self.budget}"

    @property
    def kind(self) -> str:
        """The kind of policy: full, oracle (knows the future), learned, or training-free."""
        policy = self.plan.policy
        if not policy.needs_budget:
            return "full"
        return "oracle" if getattr(policy, "needs_labels", False) else "learned" if policy.learned else "training-free"

    def values(self, metric: str) -> dict[run_folder.Key, float]:
        """A metric of every finished sample that the plan asks for, by sample."""
        asked = {planned.key for planned in self.plan.prompts}
        lines = run_folder.read_samples(self.plan.folder)
        return {key: _metric(line, metric) for key, line in lines.items() if key in asked}


@dataclass
class WarningWatcher:
    """The watcher of a run that shows only its warnings, each once. samples: how many were finished."""

    say: Say
    samples: int = 0
    warned: set[str] = field(default_factory=set)

    def phase(self, text: str) -> None:
        """Show nothing."""

    def planned(self, plan: RunPlan, finished: int) -> None:
        """Show nothing."""

    def start(self, finished: Sequence[dict[str, Any]], total: int) -> None:
        """Show nothing."""

    def warn(self, sentence: str) -> None:
        """Show the warning, if it is new."""
        if sentence not in self.warned:
            self.warned.add(sentence)
            self.say(f"warning: {sentence}")

    def sample(self, line: dict[str, Any]) -> None:
        """Count it."""
        self.samples += 1


def plan_cells(policies: Iterable[str], budgets: Sequence[str], common: RunSettings, say: Say) -> list[Cell]:
    """Check and plan every policy at every budget. A policy that takes no budget is planned once.

    common: the settings, but for policy, budget and weights.
    """
    cells = []
    for name in policies:
        policy, _, weights = name.partition("@")
        chosen = registry.parse_policy(policy).policy
        for budget in budgets if chosen.needs_budget else (None,):
            settings = replace(common, policy=policy, budget=budget, weights=weights or None)
            cell = Cell(name, budget, make_plan(settings))
            say(f"planned: {cell.title}, {len(cell.plan.prompts)} samples, {cell.plan.folder}")
            cells.append(cell)
    return cells


def run_cells(cells: Sequence[Cell], block: int, say: Say) -> bool:
    """Run what is not finished, `block` samples of every cell at a time; returns False if stopped by Ctrl-C.

    A cell that another process is writing to is left to it.
    """
    finished_keys = _finished(cells).values()
    todo = [key for key in _keys(cells) if any(key not in done for done in finished_keys)]
    if not todo:
        return True
    say("loading the weights")
    model = load_model(cells[0].plan)
    runs = DenseRuns(model, block)
    watch = WarningWatcher(say)
    for start in range(0, len(todo), block):
        keys = set(todo[start : start + block])
        for cell in cells:
            finished = run_folder.read_samples(cell.plan.folder) if cell.plan.folder.exists() else {}
            if cell.busy or keys <= finished.keys():
                continue
            began, watch.samples = time.perf_counter(), 0
            try:
                outcome = run_plan(cell.plan, watch, lambda plan: replaying_generator(plan, model, runs), keys)
            except UserError as error:
                if not str(error).startswith("Another run is writing"):
                    raise
                cell.busy = True
                say(f"left to the process that is writing it: {cell.title}")
                continue
            if outcome.interrupted:
                return False
            seconds = time.perf_counter() - began
            done, each = min(start + block, len(todo)), seconds / max(1, watch.samples)
            say(f"{done}/{len(todo)} {cell.title}: {watch.samples} samples, {each:.2f} s each")
    return True


def replaying_generator(plan: RunPlan, model: PreTrainedModel, runs: DenseRuns) -> tuple[TextGenerator, str]:
    """An ordinary run's generator on a loaded model, fed from recordings, and its device.

    Raises UserError for a suite whose generator cannot be fed from recordings.
    """
    generator, device = load_generator(plan, lambda _: model)
    runner = ReplayingRunner(
        model,
        plan.policy,
        plan.checked.budget,
        prefill=plan.settings.prefill,
        chunk=plan.settings.chunk,
        runs=runs,
        label=plan.checked.chosen.label,
    )
    if isinstance(generator, TeacherForced):
        generator.comparison.runner = runner
        generator.comparison.dense_passes = runs.dense_passes
    elif isinstance(generator, Generator):
        generator.runner = runner
    else:
        raise UserError(f"Cells of {plan.checked.suite.name} cannot share dense runs: run them one by one.")
    return generator, device


def _keys(cells: Sequence[Cell]) -> list[run_folder.Key]:
    return list(dict.fromkeys(planned.key for cell in cells for planned in cell.plan.prompts))


def _finished(cells: Sequence[Cell]) -> dict[str, set[run_folder.Key]]:
    return {
        cell.title: set(run_folder.read_samples(cell.plan.folder)) if cell.plan.folder.exists() else set()
        for cell in cells
    }


def _metric(line: Mapping[str, Any], metric: str) -> float:
    return float(line[metric] if metric in ("score", "occupancy_mean", "occupancy_max") else line["metrics"][metric])
