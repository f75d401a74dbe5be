"""The runs of a folder as a gate against papers takes them: single ones, those of a mean over suites, and trainings.

A run of a fine-tuned model speaks as the model that it was made from, and the full cache beside it is that model's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from evictbench.errors import UserError
from evictbench.gate.cells import but_for_training, cell_name
from evictbench.gate.wanted import JOINT
from evictbench.registry import load_policy
from evictbench.store.frame import RUN_COLUMNS, document_scores, read_results
from evictbench.store.select import FULL, comparable

if TYPE_CHECKING:
    import pandas as pd

Documents = Mapping[tuple[str, int], float]
"""(task, doc_id): the mean score over repeats, in [0, 1]."""


@dataclass(frozen=True)
class Run:
    """One run.

    columns: its `RUN_COLUMNS`, None where empty. group: a number that it shares with the runs that differ from it only
    in model, prefill, chunk, policy and budget. lengths: `task`, `token_limit` and `output_tokens` of each sample.
    """

    columns: Mapping[str, Any]
    group: int
    documents: Documents
    lengths: pd.DataFrame

    @property
    def base(self) -> str | None:
        """The model that it speaks as, where its own was fine-tuned from that one."""
        base = self.columns["base_model"]
        return None if base is None else str(base)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that it has samples of."""
        return tuple(dict.fromkeys(task for task, _ in self.documents))

    @property
    def model(self) -> str:
        """The model that it speaks as."""
        return str(self.base or self.columns["model"])

    @cached_property
    def trained(self) -> Literal["none", "scorer", "model"]:
        """What was trained for its policy. A learned policy without weights of its own has them in the model."""
        if self.base is not None:
            return "model"
        source = json.loads(self.columns["policy_source"] or "{}")
        if source.get("weights"):
            return "scorer"
        try:
            return "model" if load_policy(self.columns["policy_name"]).learned else "none"
        except UserError:
            return "none"

    def full_beside(self, among: Sequence[Run]) -> Documents | None:
        """The full cache's document scores under the model that it speaks as, the same protocol and data; None if that
        was not run."""
        found: dict[tuple[str, int], float] = {}
        for other in among:
            if other.group == self.group and other.columns["policy_name"] == FULL and self._is_of_model(other):
                found |= other.documents
        return found or None

    def _is_of_model(self, other: Run) -> bool:
        if other.base is not None:
            return False
        own, weights = self.columns, other.columns["weights"]
        if self.base is None:
            return bool(own["model"] == other.columns["model"] and own["weights"] == weights)
        if own["base_weights"] is None:
            return plain(self.base) == plain(other.columns["model"])
        return bool(own["base_weights"] == weights)


@dataclass(frozen=True)
class Arm:
    """What one row of a gate is about: a policy at a budget. trainings: for each training the runs, one for each suite
    of a mean over suites; usually one of one."""

    trainings: tuple[tuple[Run, ...], ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of the first training, which all differ from the others' in weights alone."""
        return self.trainings[0]

    @property
    def first(self) -> Run:
        """The first run, for what all have in common."""
        return self.runs[0]

    @property
    def suite(self) -> str:
        """ "gsm8k+bbh" for runs of both."""
        return JOINT.join(str(run.columns["suite"]) for run in self.runs)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that it has samples of."""
        return tuple(task for run in self.runs for task in run.tasks)

    @property
    def cell(self) -> str:
        """Policy @ budget."""
        return cell_name(self.first.columns["policy"], self.first.columns["budget"])

    @property
    def fingerprints(self) -> set[str]:
        """Of all of its runs."""
        return {str(run.columns["fingerprint"]) for runs in self.trainings for run in runs}

    @cached_property
    def of_trainings(self) -> tuple[Documents, ...]:
        """For each training its document scores."""
        return tuple({key: score for run in runs for key, score in run.documents.items()} for runs in self.trainings)

    @cached_property
    def documents(self) -> Documents:
        """The document scores, each the mean over the trainings, of documents that all have."""
        first, *others = self.of_trainings
        common = [key for key in first if all(key in other for other in others)]
        return {key: fmean(scores[key] for scores in self.of_trainings) for key in common}

    def full_beside(self, among: Sequence[Run]) -> Documents | None:
        """The full cache's document scores on all of its suites; None if one of them was not run."""
        found = [run.full_beside(among) for run in self.runs]
        known = [documents for documents in found if documents is not None]
        return {key: score for own in known for key, score in own.items()} if len(known) == len(found) else None


def read_runs(folder: Path, bases: Mapping[str, str] | None = None) -> list[Run]:
    """The runs in a folder of results. Raises UserError if there is none.

    bases: models that were fine-tuned elsewhere, and the model that each speaks as.
    """
    samples = read_results(folder, text=False)
    given = {plain(model): base for model, base in (bases or {}).items()}
    samples = samples.assign(group=comparable(samples.assign(model="", weights="")))
    runs = []
    for _, own in samples.groupby("fingerprint", observed=True, sort=False):
        first = own.iloc[0]
        columns = {name: None if first[name] != first[name] else first[name] for name in RUN_COLUMNS}
        columns["base_model"] = given.get(plain(str(columns["model"])), columns["base_model"])
        runs.append(
            Run(
                columns=columns,
                group=int(first["group"]),
                documents=document_scores(own),
                lengths=own[["task", "token_limit", "output_tokens"]],
            )
        )
    unknown = [model for model in bases or {} if plain(model) not in {plain(run.columns["model"]) for run in runs}]
    if unknown:
        raise UserError(f"No run in {folder} is of the model {unknown[0]}, whose base is named.")
    return runs


def arms(runs: Sequence[Run], joint: Collection[str] = (), trainings: bool = False) -> list[Arm]:
    """Every arm of these runs.

    joint: suites of means over suites ("gsm8k+bbh"), for which runs that are alike in all else are put together.
    trainings: whether runs that differ in their weights alone are one arm.
    """
    sets: list[tuple[Run, ...]] = [(run,) for run in runs]
    for name in joint:
        sets += _of_suites(runs, name.split(JOINT))
    if not trainings:
        return [Arm((one,)) for one in sets]
    several: dict[tuple[Any, ...], list[tuple[Run, ...]]] = {}
    for one in sets:
        several.setdefault(tuple(but_for_training(run.columns) for run in one), []).append(one)
    return [Arm(tuple(found)) for found in several.values()]


def plain(model: str) -> str:
    """A model's name without its organisation, in small letters."""
    return model.rstrip("/").rpartition("/")[2].casefold()


def _of_suites(runs: Sequence[Run], suites: Sequence[str]) -> Iterator[tuple[Run, ...]]:
    """Runs on each of several suites, with the same model, policy, weights, budget and prefill."""
    found: dict[tuple[Any, ...], list[list[Run]]] = {}
    for run in runs:
        if run.columns["suite"] in suites:
            by_suite = found.setdefault(_of_policy(run), [[] for _ in suites])
            by_suite[suites.index(str(run.columns["suite"]))].append(run)
    for by_suite in found.values():
        yield from product(*by_suite)


def _of_policy(run: Run) -> tuple[Any, ...]:
    names = ("model", "weights", "policy", "policy_settings", "budget", "prefill", "chunk", "dtype", "seed")
    return (*(run.columns[name] for name in names), _weights_of(run))


def _weights_of(run: Run) -> str:
    """The hash of the policy's own weights, "" where it has none."""
    source = json.loads(run.columns["policy_source"] or "{}")
    return str((source.get("weights") or {}).get("sha256", ""))
