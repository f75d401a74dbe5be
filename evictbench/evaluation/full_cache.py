"""The full cache's run that a run is compared with, and what is doubtful about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.store import run_folder
from evictbench.store.doubts import doubts
from evictbench.store.select import BUDGETED, FULL

if TYPE_CHECKING:
    from evictbench.evaluation.plan import RunPlan


def doubts_about(plan: RunPlan) -> Iterator[str]:
    """What is doubtful about this run, where it is one of the full cache, or about the full cache's run beside it."""
    folder = plan.folder if plan.checked.chosen.name == FULL else _beside(plan)
    if folder is not None:
        samples = run_folder.read_samples(folder).values()
        yield from doubts(line for line in samples if line["task"] in plan.tasks)


def _beside(plan: RunPlan) -> Path | None:
    """The folder of the full cache's run with the same model, data and protocol; None where there is none."""
    own = _shared(plan.fingerprint)
    for file in sorted(plan.folder.parent.glob(f"{FULL}-*/{run_folder.RUN}")):
        try:
            identity = run_folder.read_run(file.parent)["identity"]
            if identity["policy"]["name"] == FULL and _shared(identity) == own:
                return file.parent
        except (UserError, KeyError, TypeError):  # a damaged neighbour is no reason to end this run
            continue
    return None


def _shared(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What runs of two policies have in common: all but the policy, its budget, and how a budgeted prompt is read."""
    protocol = {name: value for name, value in identity["protocol"].items() if name not in BUDGETED}
    return {**{name: identity[name] for name in identity if name not in ("policy", "budget")}, "protocol": protocol}
