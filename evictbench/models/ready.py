"""A policy made ready for a model: named, built, fitted, with its weights. It imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench import registry
from evictbench.errors import UserError
from evictbench.models import policy_weights
from evictbench.models.policy_weights import Weights
from evictbench.policy.base import BasePolicy
from evictbench.policy.budget import Budget
from evictbench.policy.ragged import PagedPolicy, RaggedPolicy
from evictbench.policy.step import ModelShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from evictbench.registry import ChosenPolicy


@dataclass(frozen=True)
class ReadyPolicy:
    """A policy that can run on a model.

    policy: fitted to the model, and with its weights if it is learned. label: its name with its settings. shape: the
    model's sizes. model: the model's name in sentences. weights: what the policy has been given, if it is learned.
    """

    policy: BasePolicy
    label: str
    shape: ModelShape
    model: str
    weights: Weights | None

    def check_budget(self, budget: Budget | None, *lengths: int) -> None:
        """Raise UserError for a budget that the policy cannot work with on this model, or on texts of these lengths."""
        if budget is None:
            return
        self.policy.check_budget(budget)
        if budget.tokens is not None:
            self.policy.check_entries(budget.tokens, self.shape, label=self.label, model=self.model)
        for length in sorted(set(lengths)):
            if budget.tokens is None:
                entries = budget.at(length, length)
                given = f"the {entries} that {budget} of {length} tokens gives"
                self.policy.check_entries(entries, self.shape, label=self.label, model=self.model, given=given)
            if isinstance(self.policy, RaggedPolicy):
                self.policy.threshold(budget, length)


def ready_policy(
    policy: str | ChosenPolicy | BasePolicy,
    config: PretrainedConfig,
    *,
    model: str = "this model",
    model_sha256: Callable[[], str] = lambda: "",
    weights: str | Weights | None = None,
    stated_length: int | None = None,
    model_argument: str | None = None,
    model_folder: Callable[[], Path | None] = lambda: None,
) -> ReadyPolicy:
    """Make a policy ready for the model that has this config.

    policy: as `--policy` takes it ("h2o:group=max", "file.py:Class"), or parsed, or an object. model: the model's name
    in results. model_sha256: returns the hash of the model's weights (`load.weights_hash`); it is called only to tell
    which trained weights belong to the model. weights: a folder, a hub id, or weights that are loaded; None: those that
    come with the policy, unless the object has some already. stated_length: as of `PagedPolicy`. model_argument: what
    `--model` takes to mean this model, where that is not its name in results. model_folder: returns the folder of the
    model's files with its weights (`load.whole_folder`); it is called only for a policy whose weights lie in there.
    Raises UserError for a policy or weights that do not exist or do not fit.
    """
    if isinstance(policy, str):
        policy = registry.parse_policy(policy)
    label = argument = policy.name
    if isinstance(policy, registry.ChosenPolicy):
        label, argument, policy = policy.label, _argument(policy), policy.policy(policy.config)
    if isinstance(policy, PagedPolicy):
        policy.fit(config)
        policy.stated_length = stated_length
    shape = ModelShape.of(config)
    if not policy.learned:
        if weights is not None:
            raise UserError(f"{policy.name} is not learned and takes no weights: leave out {weights}.")
        return ReadyPolicy(policy, label, shape, model, None)
    if weights is None and policy.has_weights:
        return ReadyPolicy(policy, label, shape, model, None)
    if weights is None and policy.weights_in_model:
        folder = model_folder()
        if folder is None:
            raise UserError(
                f"{policy.name} has its weights in this model's own checkpoint, which is not on this disk: name them "
                "with --weights."
            )
        weights = policy_weights.of_model(policy, folder, model, shape)
    if not isinstance(weights, Weights):
        weights = policy_weights.find(
            policy, weights, model, model_sha256, shape, policy_argument=argument, model_argument=model_argument
        )
    learned: Any = policy
    learned.use(weights, shape)
    return ReadyPolicy(policy, label, shape, model, weights)


def _argument(chosen: ChosenPolicy) -> str:
    """What `--policy` takes to mean this policy."""
    if chosen.source is None:
        return chosen.label
    return f"{inspect.getfile(chosen.policy)}:{chosen.policy.__name__}{chosen.label.removeprefix(chosen.name)}"
