"""What a run is, and what its folder's fingerprint is made of: all that may move a score, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evictbench.evaluation.checks import Checked
    from evictbench.evaluation.settings import Settings
    from evictbench.models.policy_weights import Weights
    from evictbench.policy.base import Policy


def identity_of(
    settings: Settings,
    checked: Checked,
    policy: Policy,
    trained: Weights | None,
    *,
    suite_tasks: Mapping[str, Any],
    data: Mapping[str, str],
    model: str,
    model_weights: str,
    dtype: str,
    chat: bool,
    thoughts: bool,
    differs: Collection[str],
) -> dict[str, Any]:
    """The identity of a cell, as run.json holds it: values that JSON has.

    policy: as it will run, with what the suite and the model set on it. trained: what it has learned. suite_tasks: task
    to its version. data: every input of the suite to its hash or version. chat, thoughts: whether the chat template is
    used, and lets the model think. differs: what is not as the named protocol has it.
    """
    chosen = checked.protocol
    mode = policy.prefill if settings.prefill == "native" else settings.prefill
    named: dict[str, Any] = {
        "name": checked.chosen.name,
        "label": checked.chosen.label,
        "settings": checked.chosen.settings,
        "source": checked.chosen.source,
    }
    if trained is not None:
        named["weights"] = trained.identity
    if policy.ragged:
        named["stated_length"] = policy.stated_length
    return {
        "suite": checked.suite.name,
        "tasks": dict(suite_tasks),
        "data": dict(data),
        "policy": named,
        "budget": None if checked.budget is None else str(checked.budget),
        "protocol": {
            "name": chosen.name,
            "context": checked.context,
            "question": chosen.question,
            "chat": chat,
            "thoughts": thoughts,
            **asdict(chosen.sampling),
            "max_new_tokens": settings.max_new_tokens,
            "card_limit": chosen.preset.max_new_tokens,
            "prefill": settings.prefill,
            # The chunk changes what a bounded prefill evicts, and what such a policy does.
            "chunk": settings.chunk if (mode == "bounded" or policy.chunked) and checked.budget is not None else None,
            # How many repeats there are is no part of what a sample is: more of them extend a run.
            "differs": sorted(set(differs) - {"repeats"}),
        },
        "seed": settings.seed,
        "model": model,
        "weights": model_weights,
        "dtype": dtype,
    }
