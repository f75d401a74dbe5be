"""`EvictionCache`: the cache for users of Python, and of transformers' `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError, unknown
from evictbench.models import load
from evictbench.models.ready import ready_policy
from evictbench.policy.base import BasePolicy
from evictbench.policy.budget import Budget
from evictbench.policy.declarations import Prefill

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

    model: the model that will be given the cache. Its attention implementation is set to "evictbench", which is "sdpa"
    in every pass without a cache of evictbench. policy: a name with settings such as "kvpop_mlp:label=max",
    "file.py:Class", or an object. budget: entries per KV head that a decode query may see, itself included, or a share
    of the prompt such as "25%". prefill: "native" (the policy's own mode), "dense" or "bounded". prompt_length: tokens
    until the prompt ends and is cut for good; None: the first forward pass is the prompt. weights: of a learned policy,
    a folder or a hub id; None: those that come with it. rows: room for so many sequences that are admitted one by one.

    A cache serves one generation. `copy.deepcopy` of a cache that has read a context serves another question about it.
    Raises UserError for a model that cannot be measured, and for a policy, weights or a budget that do not exist or do
    not fit.
    """
    _check_arguments(model, policy, prefill, prompt_length=prompt_length, rows=rows)
    load.check_supported(model.config)
    load.check_layers(model)
    name = type(model).__name__
    try:
        source = load.source_of(model)
        name = source.result_name
    except UserError:  # a model that was made in memory
        source = None

    def model_sha256() -> str:
        return "" if source is None else load.weights_hash(source)

    ready = ready_policy(
        policy,
        model.config,
        model=name,
        model_argument=None if source is None else source.name,
        model_sha256=model_sha256,
        weights=weights,
        model_folder=lambda: None if source is None else load.whole_folder(source),
    )
    return new_cache(model, ready.policy, budget, prefill=prefill, prompt_length=prompt_length, rows=rows)


def _check_arguments(model: Any, policy: Any, prefill: Any, **numbers: Any) -> None:
    """Raise UserError for arguments of the wrong kind. numbers: by name, each 1 or more, or None."""
    if not hasattr(model, "set_attn_implementation"):
        raise UserError(f"EvictionCache takes a transformers model first, and not {model!r:.60}.")
    if not isinstance(policy, str | BasePolicy):
        hint = f": give {policy.__name__}()" if isinstance(policy, type) else ""
        raise UserError(f"A policy is a name such as 'h2o:group=max', or an object, and not {policy!r:.60}{hint}.")
    if prefill not in get_args(Prefill):
        raise unknown("prefill", str(prefill), get_args(Prefill))
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise UserError(f"{name} is a whole number from 1 on, and not {number!r}.")
