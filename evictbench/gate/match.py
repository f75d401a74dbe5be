"""Which runs a published number is about, and how their protocols differ.

These count as the same: a model under another organisation or in other letters; a budget written another way; a setting
of the policy that is its default; a task of lm-eval's own, with or without "lm-eval-". Differences of dtype, batch
size, number of documents and answers per document are passed over: they move the score and the full cache's alike, or
only change how sure it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.gate.arms import Arm, Run, plain
from evictbench.gate.wanted import MEAN, Wanted, has_length, preset_tasks, wanted
from evictbench.policy.budget import Budget
from evictbench.registry import LM_EVAL_NAME, load_policy, parse_label
from evictbench.store.select import SAMPLING, text_of

if TYPE_CHECKING:
    import pandas as pd

    from evictbench.store.published_number import Published

SAME_NAME = ("context", "question", "chat", "chunk")
"""Fields of a published protocol that are compared with the run's column of that name."""

DECISIVE = ("question", "temperature", "max_new_tokens")
"""Fields that a finding mentions if the paper does not state them."""

ALTERNATIVES = " or "
"""What stands between the values of a published protocol that are held to be alike."""

TRAINED = {"none": "nothing", "scorer": "a scorer beside the frozen model", "model": "the model itself"}
"""What was trained, in words."""


def speaks_of(entry: Published, arm: Arm) -> bool:
    """Whether model, policy (by name), budget, suite and task are the arm's."""
    run = wanted(entry)
    return (
        plain(run.model) == plain(arm.first.model)
        and run.policy_name == arm.first.columns["policy_name"]
        and _same_suites(run, arm)
        and _budget(arm.first.columns["budget"]) in (_budget(run.budget), _budget(entry.budget))
        and (entry.task == MEAN or any(task in arm.tasks for task in entry.tasks or (entry.task,)))
    )


def differences(entry: Published, arm: Arm) -> list[str]:
    """A phrase about each thing in which an arm that a number speaks of is not as the paper has it: settings of the
    policy, budget, training, protocol, tasks."""
    parts, lacking = tasks_of(entry, arm)
    differs = other_settings(entry, arm) + _other_budget(entry, arm) + _other_training(entry, arm)
    for run, tasks in zip(arm.runs, parts, strict=True):
        where = f" on {run.columns['suite']}" if len(arm.runs) > 1 else ""
        differs += [
            f"{name}{where} ({text_of(here)} here, {text_of(there)} there)"
            for name, here, there in _differing(entry, run, arm, tasks)
        ]
    if lacking:
        differs.append(f"tasks ({', '.join(lacking)} not run here, part of the mean there)")
    return differs


def other_settings(entry: Published, arm: Arm) -> list[str]:
    """A phrase about each setting of the policy that differs between the run and the number."""
    label, run = wanted(entry).policy, arm.first.columns
    try:
        stated = parse_label(label).settings
    except UserError:
        same = label == run["policy"]
        return [] if same else [f"policy ({run['policy']} here, {label} there)"]
    own = json.loads(run["policy_settings"])
    return [
        f"{name} of the policy ({text_of(own[name])} here, {text_of(value)} there)"
        for name, value in json.loads(json.dumps(stated, default=str)).items()
        if name in own and own[name] != value
    ]


def tasks_of(entry: Published, arm: Arm) -> tuple[list[tuple[str, ...]], list[str]]:
    """The tasks that a number is about, for each suite of the arm, and those of them that the arm lacks.

    A mean is over the tasks that the number names, or those of the suite's protocol for that paper, or of its default
    protocol if it has none for the paper, or those that were run if the suite is not installed.
    """
    parts = []
    for name, run in zip(wanted(entry).suites, arm.runs, strict=True):
        of_suite = (preset_tasks(entry, name) or run.tasks) if entry.task == MEAN else (entry.task,)
        parts.append(entry.tasks or of_suite)
    return parts, [task for own, run in zip(parts, arm.runs, strict=True) for task in own if task not in run.tasks]


def weights_of(entry: Published, parts: Sequence[Sequence[str]], documents: Mapping[str, int]) -> dict[str, float]:
    """How each task of `tasks_of` weighs in the mean, 1 in all: suites alike, and within one its tasks alike or by
    their number of documents, as the paper has it. documents: of each task."""
    weights: dict[str, float] = {}
    for tasks in parts:
        sizes = {task: documents[task] if entry.weighting == "documents" else 1 for task in tasks}
        whole = sum(sizes.values()) or 1
        weights |= {task: size / whole / len(parts) for task, size in sizes.items()}
    return weights


def unstated(entry: Published) -> list[str]:
    """The decisive fields that the paper does not state, as far as we know."""
    return [name for name in DECISIVE if entry.protocol.get(name) is None]


def _same_suites(run: Wanted, arm: Arm) -> bool:
    own = [str(one.columns["suite"]) for one in arm.runs]
    return len(own) == len(run.suites) and all(
        name in (suite, suite.removeprefix(LM_EVAL_NAME)) for name, suite in zip(run.suites, own, strict=True)
    )


def _other_budget(entry: Published, arm: Arm) -> list[str]:
    here, there = arm.first.columns["budget"], wanted(entry).budget
    same = _budget(here) == _budget(there)
    return [] if same else [f"budget ({here} of the tokens seen here, {there} entries there)"]


def _other_training(entry: Published, arm: Arm) -> list[str]:
    here = arm.first.trained
    if here == entry.trained:
        return []
    return [f"training ({TRAINED[here]} was trained here, {TRAINED[entry.trained]} there, and the two are not alike)"]


def _differing(entry: Published, run: Run, arm: Arm, tasks: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    stated, own = wanted(entry).protocol, run.columns
    for name in SAME_NAME:
        here = own[name]
        if name in stated and (here is not None or name == "context") and not _alike(here, stated[name]):
            yield name, here, entry.protocol[name]
    if "context" not in stated and own["context"] is not None and not has_length(str(own["suite"])):
        yield "context", own["context"], None
    if "thinking" in stated and not _alike(own["thoughts"], stated["thinking"]):
        yield "thinking", own["thoughts"], stated["thinking"]
    greedy = own["temperature"] == 0
    for name in SAMPLING:
        idle = greedy and name != "temperature"
        if name in stated and not idle and not _alike(own[name], stated[name]):
            yield name, own[name], stated[name]
    prefills = (_prefill(run), own["prefill"])
    if "prefill" in stated and not any(_alike(prefill, stated["prefill"]) for prefill in prefills):
        yield "prefill", prefills[0], stated["prefill"]
    if "max_new_tokens" in stated:
        runs = [one for training in arm.trainings for one in training if one.columns["suite"] == own["suite"]]
        for one in runs:
            yield from _limit(stated["max_new_tokens"], one.lengths[one.lengths["task"].isin(tasks)])


def _limit(stated: int, lengths: pd.DataFrame) -> Iterator[tuple[str, Any, Any]]:
    """The token limits, if an answer reached the lower of two that differ. stated: the paper's."""
    other = lengths[lengths["token_limit"] != stated]
    reached = other[other["output_tokens"] >= other["token_limit"].clip(upper=stated)]
    if len(reached):
        limits = sorted({int(limit) for limit in reached["token_limit"]})
        yield "max_new_tokens", limits[0] if len(limits) == 1 else f"{limits[0]} to {limits[-1]}", stated


def _prefill(run: Run) -> str:
    """The prefill mode of a run; "native" becomes the policy's own mode if the policy is installed."""
    own = run.columns["prefill"]
    try:
        return str(load_policy(run.columns["policy_name"]).prefill_mode(own))
    except UserError:
        return str(own)


def _budget(text: str | None) -> Budget | None:
    return None if text is None else Budget.parse(str(text))


def _alike(here: Any, there: Any) -> bool:
    """Whether a run's value is the paper's, or one of those that it holds to be alike."""
    numbers = [isinstance(value, Real) and not isinstance(value, (bool, str)) for value in (here, there)]
    return abs(here - there) < 1e-9 if all(numbers) else text_of(here) in text_of(there).split(ALTERNATIVES)
