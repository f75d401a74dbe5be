"""The fingerprint of a run: everything that may move a score, and nothing else. Its hash names the run's folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from evictbench.evaluation.chat import Chat
from evictbench.evaluation.checks import Checked
from evictbench.evaluation.settings import RunSettings
from evictbench.generation.end_tokens import EndTokens
from evictbench.models.policy_weights import Weights
from evictbench.policy.base import BasePolicy
from evictbench.policy.ragged import PagedPolicy


def fingerprint_of(
    settings: RunSettings,
    checked: Checked,
    policy: BasePolicy,
    trained: Weights | None,
    *,
    suite_tasks: Mapping[str, Any],
    data: Mapping[str, str],
    model: str,
    model_weights: str,
    base: Mapping[str, Any] | None,
    dtype: str,
    chat: Chat,
    ends: EndTokens,
    differs: Collection[str],
) -> dict[str, Any]:
    """The fingerprint as run.json holds it under "identity": values that JSON has.

    base: what the model was fine-tuned from, None for one that names no base.
    policy: as it will run, with what the suite and the model set on it. trained: its weights, None for a policy that
    is not learned. suite_tasks: task to its version. data: every input of the suite to its hash or version.
    model, model_weights: the model's name and the hash of its weights. chat: how the chat template is used. ends: what
    ends an answer. differs: names of what is not as the named protocol has it.
    """
    protocol = checked.protocol
    mode = policy.prefill_mode(settings.prefill)
    policy_entry: dict[str, Any] = {
        "name": checked.chosen.name,
        "label": checked.chosen.label,
        "settings": checked.chosen.settings,
        "source": checked.chosen.source,
    }
    if trained is not None:
        policy_entry["weights"] = trained.identity
    by_chunk = mode == "bounded"
    if isinstance(policy, PagedPolicy):
        policy_entry["stated_length"] = policy.stated_length
        by_chunk = by_chunk or policy.chunk_dependent
    return {
        "suite": checked.suite.name,
        "tasks": dict(suite_tasks),
        "data": dict(data),
        "policy": policy_entry,
        "budget": None if checked.budget is None else str(checked.budget),
        "protocol": {
            "name": protocol.name,
            "context": checked.context,
            "question": protocol.question,
            "chat": chat.used,
            "thoughts": chat.thinking.on,
            **_mentioned(
                chat_template=None if chat.template is None else chat.template.identity,
                system_prompt=chat.system_prompt,
                end_tokens=ends.identity,
            ),
            **asdict(protocol.sampling),
            "max_new_tokens": settings.max_new_tokens,
            "card_limit": protocol.preset.max_new_tokens,
            "prefill": settings.prefill,
            # The chunk changes what a bounded prefill evicts, and what a policy that works by the chunk does.
            "chunk": settings.chunk if by_chunk and checked.budget is not None else None,
            # The number of repeats does not change a sample: more of them extend a run.
            "differs": sorted(set(differs) - {"repeats"}),
        },
        "seed": settings.seed,
        "model": model,
        "weights": model_weights,
        "dtype": dtype,
        **({} if base is None else {"base_model": dict(base)}),
    }


def _mentioned(**values: str | None) -> dict[str, str]:
    """The values that are not None: what is as it always was keeps its fingerprint."""
    return {name: value for name, value in values.items() if value is not None}
