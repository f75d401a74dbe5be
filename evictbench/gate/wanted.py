"""The run that would match a published number: policy, training, model, budget and suites; or why no run here can."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evictbench.errors import UserError
from evictbench.policy.budget import Budget
from evictbench.registry import LM_EVAL, LM_EVAL_NAME, POLICIES, SUITES, load_policy, load_suite, names, parse_label
from evictbench.store.published_number import Published
from evictbench.store.select import FULL
from evictbench.suite.spec import Suite

MEAN = "mean"
"""The task of a number that is an average over tasks."""

RETENTION = "retention"
"""The metric of a number that is a score over the full cache's."""

SCORES = re.compile(r"accuracy|score|match|f1|rouge|pass@1|avg@|average", re.IGNORECASE)
"""Published metrics that are the same as a run's score."""

JOINT = "+"
"""What stands between the suites of a mean over suites."""

K = 1024
"""Tokens of the K in "8K"."""


@dataclass(frozen=True)
class Wanted:
    """The run, or the runs on several suites, that a number is about.

    policy: its label. trained: what was trained for it ("none", "scorer", "model"). model: the one that it is, or was
    fine-tuned from. budget: as --budget takes it, a fixed number of entries where the paper's share gives one. suites:
    each with the tasks that are named, () for those of its protocol. protocol: the fields that the paper states,
    numbers of tokens as numbers.
    """

    policy: str
    trained: str
    model: str
    budget: str | None
    suites: Mapping[str, tuple[str, ...]]
    protocol: Mapping[str, Any]

    @property
    def policy_name(self) -> str:
        """The policy without its settings."""
        return self.policy.partition(":")[0]


def wanted(entry: Published) -> Wanted:
    """The run that a number is about, as far as its paper says."""
    protocol = {name: value for name, value in entry.protocol.items() if value is not None}
    if (context := tokens(protocol.get("context"))) is not None:
        protocol["context"] = context
    tasks = entry.tasks or (() if entry.task == MEAN else (entry.task,))
    suites = dict.fromkeys(entry.suite.split(JOINT), tasks)
    return Wanted(entry.runs_as or entry.policy, entry.trained, entry.model, _budget(entry), suites, protocol)


def commands(entry: Published) -> list[str]:
    """The commands whose runs a number would be held against, one for each suite. What the paper states beside its
    protocol's preset, and what the preset does not say, is left to the reader; [] if no run here can match it."""
    if missing(entry) is not None:
        return []
    run = wanted(entry)
    lines = []
    for suite, tasks in run.suites.items():
        words = ["evictbench", "run", "--policy", run.policy, *(["--budget", run.budget] if run.budget else [])]
        words += ["--model", "OUT/model" if run.trained == "model" else run.model]
        words += ["--suite", LM_EVAL + suite.removeprefix(LM_EVAL_NAME) if suite.startswith(LM_EVAL_NAME) else suite]
        words += ["--protocol", name] if (name := _preset_name(entry, suite)) not in (None, "default") else []
        words += ["--tasks", ",".join(tasks)] if tasks and not suite.startswith(LM_EVAL_NAME) else []
        words += ["--context", str(run.protocol["context"])] if "context" in run.protocol else []
        words += ["--prefill", run.protocol["prefill"]] if "prefill" in run.protocol else []
        lines.append(shlex.join(words))
    return lines


def is_score(entry: Published) -> bool:
    """Whether a number is a policy's score, or its share of the full cache's, and not the full cache's own, a speed or
    a perplexity."""
    known = entry.metric == RETENTION or SCORES.search(entry.metric) is not None
    return entry.policy != FULL and entry.unit in ("percent", "share") and known


def missing(entry: Published) -> str | None:
    """A sentence that says why no run here can match a number; None if one can."""
    if entry.policy == FULL:
        return "It is the full cache's, which runs are not held against."
    if not is_score(entry):
        return f"It is no score but {entry.metric} in {entry.unit}, and a gate compares scores and retentions."
    run = wanted(entry)
    return _no_policy(run) or _no_model(run) or _no_budget(run) or _no_suite(entry, run) or _no_protocol(entry, run)


def preset_tasks(entry: Published, suite: str) -> tuple[str, ...] | None:
    """The tasks of a suite's protocol for the paper, or of its default one; None if the suite is not installed."""
    found = _installed(suite)
    name = _preset_name(entry, suite)
    if found is None or name is None:
        return None
    return found.all_protocols[name].tasks


def has_length(suite: str) -> bool:
    """Whether the texts of a suite are made to a length, so that a paper that states none may still have had one; True
    for a suite that is not installed."""
    found = _installed(suite)
    return found is None or found.default_context is not None


def tokens(stated: Any) -> int | None:
    """A number of tokens as papers write it: 8192 or "8K"; None for anything else."""
    if isinstance(stated, int) and not isinstance(stated, bool):
        return stated
    found = re.fullmatch(r"(\d+)(K?)", str(stated))
    return int(found[1]) * (K if found[2] else 1) if found else None


def _budget(entry: Published) -> str | None:
    context = tokens(entry.protocol.get("context"))
    if entry.budget is None or entry.share_of == "text" or context is None:
        return entry.budget
    share = Budget.parse(entry.budget).share
    return entry.budget if share is None else str(round(share * context))


def _no_policy(run: Wanted) -> str | None:
    if run.policy_name not in names(POLICIES):
        return f"No policy here is {run.policy_name}."
    try:
        parse_label(run.policy)
    except UserError as error:
        return str(error)
    return None


def _no_model(run: Wanted) -> str | None:
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", run.model) is None:
        return f"The paper names no one model ({run.model})."
    return None


def _no_budget(run: Wanted) -> str | None:
    policy = load_policy(run.policy_name)
    return "The paper does not state its budget." if policy.needs_budget and run.budget is None else None


def _no_suite(entry: Published, run: Wanted) -> str | None:
    for name, tasks in run.suites.items():
        if name.startswith(LM_EVAL_NAME):
            continue
        suite = _installed(name)
        if suite is None:
            return f"No suite here is {name}."
        others = [task for task in tasks if task not in suite.tasks]
        if others:
            return f"The suite {name} has no task {', '.join(others)}."
        if suite.default_context is not None and tokens(run.protocol.get("context")) is None:
            stated = entry.protocol.get("context")
            return f"The paper does not state the length of its texts{f' but as {stated}' if stated else ''}."
    return None


def _no_protocol(entry: Published, run: Wanted) -> str | None:
    if run.protocol.get("prefill") == "masked":
        return "Evicted entries are only masked there, and may return; a run here frees them."
    samples = run.protocol.get("samples")
    if samples is not None and not isinstance(samples, int):
        return f"The paper takes {samples} of the documents and does not say which."
    return None


def _installed(name: str) -> Suite | None:
    if name not in names(SUITES):
        return None
    try:
        return load_suite(name)
    except UserError:
        return None


def _preset_name(entry: Published, suite: str) -> str | None:
    """The name of a suite's protocol for the paper, or "default"; None if the suite is not installed."""
    found = _installed(suite)
    if found is None:
        return None
    own = [
        name
        for name, protocol in found.all_protocols.items()
        if name != "default"
        and (entry.paper in protocol.source or _first_word(entry.title) == _first_word(protocol.source))
    ]
    context = tokens(entry.protocol.get("context"))
    of_length = [name for name in own if getattr(found.all_protocols[name], "context", None) == context]
    return next(iter([*of_length, *own, *(["default"] if "default" in found.all_protocols else [])]), None)


def _first_word(text: str) -> str:
    return re.split(r"[\s,:(]", text)[0]
