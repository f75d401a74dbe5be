"""Which runs a published number is about, and how their protocols differ.

These count as the same: a model under another organisation or in other letters; a budget written another way; a setting
of the policy that is its default. Differences of dtype, batch size, number of documents and answers per document are
passed over: they move the score and the full cache's alike, or only change how sure it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.gate.cells import cell_name
from evictbench.policy.budget import Budget
from evictbench.registry import LM_EVAL, SUITES, load_policy, load_suite, names, parse_label
from evictbench.store.frame import RUN_COLUMNS, document_scores, read_results
from evictbench.store.select import FULL, SAMPLING, comparable, text_of

if TYPE_CHECKING:
    import pandas as pd

    from evictbench.store.published_number import Published

MEAN = "mean"

SCORES = re.compile(r"accuracy|score|match|f1|rouge|pass@1|avg@|average", re.IGNORECASE)
"""Published metrics that are the same as a run's score."""

SAME_NAME = ("context", "question", "chat", "chunk")
"""Fields of a published protocol that are compared with the run's column of that name."""

DECISIVE = ("question", "temperature", "max_new_tokens")
"""Fields that a finding mentions if the paper does not state them."""


@dataclass(frozen=True)
class Arm:
    """One run.

    run: its `RUN_COLUMNS`, None where empty. group: a number that it shares with the runs that differ from it only in
    prefill, chunk, policy and budget. documents: the mean score over repeats by (task, doc_id). lengths: `task`,
    `token_limit` and `output_tokens` of each sample.
    """

    run: Mapping[str, Any]
    group: int
    documents: Mapping[tuple[str, int], float]
    lengths: pd.DataFrame

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that it has samples of."""
        return tuple(dict.fromkeys(task for task, _ in self.documents))

    @property
    def cell(self) -> str:
        """Policy @ budget."""
        return cell_name(self.run["policy"], self.run["budget"])


def arms(folder: Path) -> list[Arm]:
    """The runs in a folder of results. Raises UserError if there is none."""
    samples = read_results(folder, text=False)
    samples = samples.assign(group=comparable(samples))
    runs = []
    for _, own in samples.groupby("fingerprint", observed=True, sort=False):
        first = own.iloc[0]
        runs.append(
            Arm(
                run={name: None if first[name] != first[name] else first[name] for name in RUN_COLUMNS},
                group=int(first["group"]),
                documents=document_scores(own),
                lengths=own[["task", "token_limit", "output_tokens"]],
            )
        )
    return runs


def full_beside(arm: Arm, among: Sequence[Arm]) -> Mapping[tuple[str, int], float] | None:
    """The full cache's document scores under the same model, protocol and data; None if it was not run."""
    documents: dict[tuple[str, int], float] = {}
    for other in among:
        if other.group == arm.group and other.run["policy_name"] == FULL:
            documents |= other.documents
    return documents or None


def is_score(entry: Published) -> bool:
    """Whether a number is a policy's score, and not the full cache's, a speed or a perplexity."""
    return entry.policy != FULL and entry.unit in ("percent", "share") and SCORES.search(entry.metric) is not None


def speaks_of(entry: Published, arm: Arm) -> bool:
    """Whether model, policy (by name), budget, suite and task are the run's."""
    return (
        entry.suite == arm.run["suite"].removeprefix(LM_EVAL)
        and _plain(entry.model) == _plain(arm.run["model"])
        and entry.policy.partition(":")[0] == arm.run["policy_name"]
        and _budget(entry.budget) == _budget(arm.run["budget"])
        and (entry.task == MEAN or entry.task in arm.tasks)
    )


def other_settings(entry: Published, arm: Arm) -> list[str]:
    """A phrase about each setting of the policy that differs between the run and the number."""
    try:
        stated = parse_label(entry.policy).settings
    except UserError:
        same = entry.policy == arm.run["policy"]
        return [] if same else [f"policy ({arm.run['policy']} here, {entry.policy} there)"]
    own = json.loads(arm.run["policy_settings"])
    return [
        f"{name} of the policy ({text_of(own[name])} here, {text_of(value)} there)"
        for name, value in json.loads(json.dumps(stated, default=str)).items()
        if name in own and own[name] != value
    ]


def tasks_of(entry: Published, arm: Arm) -> tuple[tuple[str, ...], list[str]]:
    """The tasks that a number is about, and those of them that the run lacks. A mean is over the tasks of the suite's
    protocol for that paper, or of its default protocol if it has none for the paper."""
    if entry.task != MEAN:
        return (entry.task,), []
    tasks = _preset(entry) or arm.tasks
    return tasks, [task for task in tasks if task not in arm.tasks]


def protocol_differs(entry: Published, arm: Arm, tasks: Sequence[str]) -> list[str]:
    """A phrase about each field of the protocol that differs from what the paper states."""
    return [
        f"{name} ({text_of(here)} here, {text_of(there)} there)" for name, here, there in _differing(entry, arm, tasks)
    ]


def unstated(entry: Published) -> list[str]:
    """The decisive fields that the paper does not state, as far as we know."""
    return [name for name in DECISIVE if entry.protocol.get(name) is None]


def _differing(entry: Published, arm: Arm, tasks: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    stated = {name: value for name, value in entry.protocol.items() if value is not None}
    for name in SAME_NAME:
        here = arm.run[name]
        if name in stated and (here is not None or name == "context") and not _alike(here, stated[name]):
            yield name, here, stated[name]
    if "thinking" in stated and not _alike(arm.run["thoughts"], stated["thinking"]):
        yield "thinking", arm.run["thoughts"], stated["thinking"]
    greedy = arm.run["temperature"] == 0
    for name in SAMPLING:
        idle = greedy and name != "temperature"
        if name in stated and not idle and not _alike(arm.run[name], stated[name]):
            yield name, arm.run[name], stated[name]
    prefill = _prefill(arm)
    if stated.get("prefill") not in (None, prefill):
        yield "prefill", prefill, stated["prefill"]
    if "max_new_tokens" in stated:
        yield from _limit(stated["max_new_tokens"], arm.lengths[arm.lengths["task"].isin(tasks)])


def _limit(stated: int, lengths: pd.DataFrame) -> Iterator[tuple[str, Any, Any]]:
    """The token limits, if an answer reached the lower of two that differ. stated: the paper's."""
    other = lengths[lengths["token_limit"] != stated]
    reached = other[other["output_tokens"] >= other["token_limit"].clip(upper=stated)]
    if len(reached):
        limits = sorted({int(limit) for limit in reached["token_limit"]})
        yield "max_new_tokens", limits[0] if len(limits) == 1 else f"{limits[0]} to {limits[-1]}", stated


def _prefill(arm: Arm) -> str:
    """The prefill mode of a run; "native" becomes the policy's own mode if the policy is installed."""
    own = arm.run["prefill"]
    try:
        return str(load_policy(arm.run["policy_name"]).prefill_mode(own))
    except UserError:
        return str(own)


def _preset(entry: Published) -> tuple[str, ...] | None:
    """The tasks of the suite's protocol for that paper, or of its default one; None if the suite is not installed."""
    if entry.suite not in names(SUITES):
        return None
    try:
        suite = load_suite(entry.suite)
    except UserError:
        return None
    for name, protocol in suite.protocols.items():
        cited = re.split(r"[\s,:(]", protocol.source)[0]
        if name != "default" and (entry.paper in protocol.source or re.split(r"[\s,:(]", entry.title)[0] == cited):
            return protocol.tasks
    default = suite.protocols.get("default")
    return suite.tasks if default is None else default.tasks


def _plain(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].casefold()


def _budget(text: str | None) -> Budget | None:
    return None if text is None else Budget.parse(str(text))


def _alike(here: Any, there: Any) -> bool:
    numbers = [isinstance(value, Real) and not isinstance(value, (bool, str)) for value in (here, there)]
    return abs(here - there) < 1e-9 if all(numbers) else text_of(here) == text_of(there)
