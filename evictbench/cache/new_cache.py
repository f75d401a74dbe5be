"""Which cache a policy lives in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evictbench.cache.paged.expiry import ExpiryCache
from evictbench.cache.paged.head_budget import HeadBudgetCache
from evictbench.cache.slots.cache import SlotCache
from evictbench.policy.base import Policy
from evictbench.policy.ragged import HeadBudgetPolicy, RaggedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.base import KVCache
    from evictbench.policy.base import BasePolicy
    from evictbench.policy.budget import Budget


def new_cache(
    model: PreTrainedModel, policy: BasePolicy, budget: Budget | int | str | None = None, **settings: Any
) -> KVCache:
    """The cache of a policy's family: slots, or pages where the policy's heads keep different numbers of entries.

    policy: with its weights, if it is learned. settings: the other arguments of `KVCache`. Errors as of `KVCache`.
    """
    if isinstance(policy, Policy):
        return SlotCache(model, policy, budget, **settings)
    if isinstance(policy, RaggedPolicy):
        return ExpiryCache(model, policy, budget, **settings)
    if isinstance(policy, HeadBudgetPolicy):
        return HeadBudgetCache(model, policy, budget, **settings)
    raise TypeError(f"{type(policy).__name__} is neither a Policy nor a RaggedPolicy nor a HeadBudgetPolicy.")
