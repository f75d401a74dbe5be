"""`EvictionCache`: the cache for users of Python, and of transformers' `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.models import load
from evictbench.models.ready import ready_policy
from evictbench.policy.base import BasePolicy, Prefill
from evictbench.policy.budget import Budget

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.base import KVCache


def EvictionCache(
    model: PreTrainedModel,
    policy: str | BasePolicy,
    budget: Budget | int | str | None = None,
    *,
    prefill: Prefill = "native",
    prompt_length: int | None = None,
    weights: str | None = None,
    rows: int | None = None,
) -> KVCache:
    """A transformers cache under an eviction policy, for `model.generate(..., cache=...)` or a loop of one's own.

    model: the model that will be given the cache. Its attention implementation is set to "evictbench". policy: a name
    with settings such as "kvpop_mlp:label=max", "file.py:Class", or an object. budget: entries per KV head that a
    decode query may see, itself included, or a share of the prompt such as "25%". prefill: "native" (the policy's own
    mode), "dense" or "bounded". prompt_length: tokens until the prompt ends and is cut for good; None: the first
    forward pass is the prompt. weights: of a learned policy, a folder or a hub id; None: those that come with it. rows:
    room for so many sequences that are admitted one by one.

    A cache serves one generation. `copy.deepcopy` of a cache that has read a context serves another question about it.
    Raises UserError for a model that cannot be measured, and for a policy, weights or a budget that do not exist or do
    not fit.
    """
    name = type(model).__name__
    try:
        source = load.source_of(model)
        name = source.result_name
    except UserError:  # a model that was made in memory
        source = None

    def model_sha256() -> str:
        return "" if source is None else load.weights_hash(source)

    load.check_supported(model.config)
    load.check_layers(model)
    ready = ready_policy(policy, model.config, model=name, model_sha256=model_sha256, weights=weights)
    return new_cache(model, ready.policy, budget, prefill=prefill, prompt_length=prompt_length, rows=rows)
