"""The cells of two folders of runs, each with its counterpart, and their samples side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.store.frame import KEY, RUN_COLUMNS
from evictbench.store.select import BUDGETED, SHARED, text_of

if TYPE_CHECKING:
    import pandas as pd

    from evictbench.stats.paired import Documents

ALIKE = tuple(name for name in SHARED if name not in ("weights", "results_version"))
"""Columns in which a cell and its counterpart must be alike. Weights and results versions have rules of their own."""

TOLD_APART = ("model", *ALIKE, *BUDGETED)
"""Columns that are named where a folder has several cells of one policy, budget and suite."""

OF_A_TRAINING = ("policy_source", "fingerprint", "folder")
"""Columns in which runs that differ in their trained weights alone may differ; the model too, if it was fine-tuned."""


@dataclass(frozen=True)
class Cell:
    """One policy at one budget on one suite under one protocol.

    name: "h2o @ 256", "full". suite: its name, and what else tells the cell from others in the folder. about: the
    columns of its run. samples: one row per sample and repeat, as `read_results` has them; the means over trainings,
    where there are several. trainings: how many. deviation: the standard deviation of the score over trainings, the
    mean over tasks; None for fewer than two.
    """

    name: str
    suite: str
    about: Mapping[str, Any]
    samples: pd.DataFrame
    trainings: int = 1
    deviation: float | None = None

    @property
    def budgeted(self) -> bool:
        """Whether the cell has a budget."""
        return text_of(self.about["budget"]) != "none"

    @property
    def task(self) -> str:
        """The cell's task, or "mean" if it has several."""
        tasks = self.samples["task"].astype(str).unique()
        return str(tasks[0]) if len(tasks) == 1 else "mean"


@dataclass(frozen=True)
class Pair:
    """A cell of the runs and its counterpart in the baseline. samples: the samples of both, with the columns of each
    as <name>_here and <name>_there."""

    here: Cell
    there: Cell
    samples: pd.DataFrame

    def documents(self, column: str, side: str) -> Documents:
        """Each document's mean of a column over its repeats. side: "here" or "there"."""
        return documents(self.samples, f"{column}_{side}")


def documents(samples: pd.DataFrame, column: str) -> dict[tuple[str, int], float]:
    """(task, doc_id): the mean of a column over its repeats."""
    values_of: dict[tuple[str, int], list[float]] = {}
    rows = zip(*(samples[name].tolist() for name in ("task", "doc_id", column)), strict=True)
    for task, doc_id, value in rows:
        values_of.setdefault((task, doc_id), []).append(float(value))
    return {key: fmean(values) for key, values in values_of.items()}


def cell_name(policy: object, budget: object) -> str:
    """The name of a cell: "h2o @ 256", "full"."""
    return str(policy) if text_of(budget) == "none" else f"{policy} @ {budget}"


def cells_of(samples: pd.DataFrame) -> list[Cell]:
    """Every cell of a folder. Two copies of a run are one cell."""
    runs = samples.drop_duplicates("fingerprint")
    cells = []
    for mark, part in samples.groupby(samples["fingerprint"].astype(str), sort=False):
        about = runs[runs["fingerprint"].astype(str) == mark].iloc[0].to_dict()
        same = runs[(runs["suite"] == about["suite"]) & (runs["policy"] == about["policy"])]
        same = same[[text_of(budget) == text_of(about["budget"]) for budget in same["budget"]]]
        differing = [name for name in TOLD_APART if len({text_of(value) for value in same[name]}) > 1]
        suite = ", ".join([str(about["suite"]), *(f"{name} {text_of(about[name])}" for name in differing)])
        cells.append(Cell(cell_name(about["policy"], about["budget"]), suite, about, part))
    return cells


def over_trainings(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, those that differ in their trained weights alone put together: each sample is the mean of theirs.

    Raises UserError where not all trainings have the same samples.
    """
    several: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        several.setdefault(but_for_training(cell.about), []).append(cell)
    return [found[0] if len(found) == 1 else _mean_of(found) for found in several.values()]


def but_for_training(run: Mapping[str, Any]) -> tuple[str, ...]:
    """What runs that differ in their trained weights alone have in common; of a run without such weights, all of it.

    run: its `RUN_COLUMNS`.
    """
    fine_tuned = text_of(run["base_model"]) != "none"
    source = json.loads(run["policy_source"]) if isinstance(run["policy_source"], str) else {}
    if not fine_tuned and not source.get("weights"):
        return (str(run["fingerprint"]),)
    if source.get("weights"):
        source["weights"] = {"variant": source["weights"].get("variant")}
    skipped = {*OF_A_TRAINING, *(("model", "weights") if fine_tuned else ())}
    own = (text_of(run[name]) for name in RUN_COLUMNS if name not in skipped)
    return (*own, json.dumps(source, sort_keys=True))


def _mean_of(trainings: Sequence[Cell]) -> Cell:
    import pandas as pd

    keys = [set(zip(*(cell.samples[name].tolist() for name in KEY), strict=True)) for cell in trainings]
    for cell, own in zip(trainings, keys, strict=True):
        if own != keys[0]:
            raise UserError(
                f"The trainings of {cell.name} on {cell.suite} do not have the same samples: finish the run in "
                f"{cell.about['folder']}, or leave it out."
            )
    whole = pd.concat([cell.samples for cell in trainings])
    whole["task"] = whole["task"].astype(str)
    grouped = whole.groupby(KEY, sort=False)
    numbers = [name for name in whole.select_dtypes("number") if name not in KEY and name not in RUN_COLUMNS]
    samples = grouped.first()
    samples[numbers] = grouped[numbers].mean()
    scores = [fmean(own for own in _task_means(cell)) for cell in trainings]
    first = trainings[0]
    return replace(first, samples=samples.reset_index(), trainings=len(trainings), deviation=stdev(scores))


def _task_means(cell: Cell) -> list[float]:
    by_task: dict[str, list[float]] = {}
    for (task, _), score in documents(cell.samples, "score").items():
        by_task.setdefault(task, []).append(score)
    return [fmean(scores) for scores in by_task.values()]


def pairs(
    here: pd.DataFrame,
    there: pd.DataFrame,
    *,
    exact: bool = False,
    in_common: bool = False,
    trainings: bool = False,
) -> list[Pair]:
    """Every cell of the runs with the cell of the baseline that was made in the same way.

    here, there: frames from `read_results`, of the runs and of the baseline. exact: results versions must be equal too.
    in_common: compare the samples that both have, even if one has more. trainings: cells that differ in their trained
    weights alone are one. Raises UserError, saying what differs, for a cell without a counterpart.
    """
    ours, theirs = cells_of(here), cells_of(there)
    if trainings:
        ours, theirs = over_trainings(ours), over_trainings(theirs)
    matched: list[Pair] = []
    used: set[str] = set()
    for cell in ours:
        other = _counterpart(cell, theirs, exact)
        if str(other.about["fingerprint"]) in used:
            raise UserError(
                f"Two of the runs are {cell.name} on {cell.suite}: take one with --where or in a folder, or, if they "
                "are trainings of one policy, their mean with --trainings."
            )
        used.add(str(other.about["fingerprint"]))
        matched.append(Pair(cell, other, _side_by_side(cell, other, in_common)))
    for cell in theirs:
        if str(cell.about["fingerprint"]) not in used:
            raise UserError(
                f"The baseline has {cell.name} on {cell.suite}, and the runs have not: run it, or leave it out with "
                "--policy, --budget, --suite or --where."
            )
    return matched


def folders_apart(here: Path, there: Path) -> None:
    """Raise UserError if one folder is the other or is in it: runs compared with themselves always pass."""
    first, second = here.resolve(), there.resolve()
    if first == second or first in second.parents or second in first.parents:
        raise UserError(f"The runs in {here} and the baseline in {there} are the same or one in the other.")


def _counterpart(cell: Cell, theirs: Sequence[Cell], exact: bool) -> Cell:
    mine = cell.about
    same = [
        other for other in theirs if other.name == cell.name and str(other.about["suite"]) == str(cell.about["suite"])
    ]
    if not same:
        raise UserError(
            f"The baseline has no {cell.name} on {mine['suite']}: make it, or leave it out with --policy, --budget or "
            "--suite."
        )
    itself = [other for other in same if other.about["fingerprint"] == mine["fingerprint"]]
    if itself:
        return itself[0]
    differing = [list(_differences(cell, other, exact)) for other in same]
    alike = [other for other, sentences in zip(same, differing, strict=True) if not sentences]
    if len(alike) > 1:
        raise UserError(
            f"The baseline has {len(alike)} runs of {cell.name} on {mine['suite']} that were made in the same way: "
            "keep one of them in it, or, where they are trainings of one policy, take their mean with --trainings."
        )
    if not alike:
        nearest = min(differing, key=len)
        raise UserError(
            f"{cell.name} on {mine['suite']} cannot be held against the baseline's: {'; '.join(nearest)} "
            "(there: the baseline)."
        )
    return alike[0]


def _differences(cell: Cell, other: Cell, exact: bool) -> Iterator[str]:
    """A sentence about each difference between two cells that were to be made in the same way."""
    mine, their = (_as_its_base(about) for about in (cell.about, other.about))
    if text_of(mine["weights"]) != text_of(their["weights"]):
        models = text_of(mine["model"]), text_of(their["model"])
        yield (
            f"the model is {models[0]} here and {models[1]} there"
            if models[0] != models[1]
            else f"the weights of {models[0]} are not the same"
        )
    elif text_of(mine["weights"]) == "none" and mine["model"] != their["model"]:
        yield f"the model is {mine['model']} here and {their['model']} there"
    for name in (*ALIKE, *(BUDGETED if cell.budgeted else ()), *(["results_version"] if exact else [])):
        values = text_of(mine[name]), text_of(their[name])
        if values[0] != values[1]:
            yield f"{name} is {values[0]} here and {values[1]} there"
    data = [json.loads(str(about["data"])) for about in (mine, their)]
    for name in data[0].keys() & data[1].keys():
        if data[0][name] != data[1][name]:
            yield f"the data of {name} is not the same"
    versions = [dict(zip(side.samples["task"], side.samples["task_version"], strict=True)) for side in (cell, other)]
    for task in sorted(map(str, versions[0].keys() & versions[1].keys())):
        if versions[0][task] != versions[1][task]:
            yield f"the version of {task} is {versions[0][task]} here and {versions[1][task]} there"


def _as_its_base(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns, a fine-tuned model replaced by what it was made from: its own weights are the policy's."""
    if text_of(about["base_model"]) == "none":
        return about
    return {**about, "model": about["base_model"], "weights": about["base_weights"]}


def _side_by_side(here: Cell, there: Cell, in_common: bool) -> pd.DataFrame:
    frames = [side.samples.assign(task=side.samples["task"].astype(str)) for side in (here, there)]
    both = frames[0].merge(frames[1], on=KEY, suffixes=("_here", "_there"), how="outer", indicator="which")
    alone = both[both["which"] != "both"]
    if len(alone) and not in_common:
        first = alone.iloc[0]
        side = "the runs" if first["which"] == "left_only" else "the baseline"
        raise UserError(
            f"{here.name} on {here.suite}: {len(alone)} of {len(both)} samples are not in both; document "
            f"{first['doc_id']} of {first['task']} is in {side} alone. --paired takes those that both have."
        )
    both = both[both["which"] == "both"]
    if both.empty:
        raise UserError(f"{here.name} on {here.suite}: no document is common to the runs and the baseline.")
    if "prompt_hash_here" in both and "prompt_hash_there" in both:
        known = both[["prompt_hash_here", "prompt_hash_there"]].notna().all(axis=1)
        other = both[known & (both["prompt_hash_here"] != both["prompt_hash_there"])]
        if len(other):
            first = other.iloc[0]
            raise UserError(
                f"{here.name} on {here.suite}: document {first['doc_id']} of {first['task']} is another prompt here "
                "than in the baseline, so they are not the same samples."
            )
    return both
