"""What a policy's class may declare. Names and combinations are checked when the class is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal, get_args

from evictbench.errors import UserError
from evictbench.policy.step import ACTIVATIONS, MemoryTensor, SlotTensor

Signal = Literal["last_query_probs", "window_probs", "mass", "recent_probs"]
Granularity = Literal["head", "layer", "model"]
Prefill = Literal["native", "dense", "bounded"]
"""What a run may ask for; "native" is the policy's own mode."""

PrefillMode = Literal["dense", "bounded", "sparse"]
Phase = Literal["prompt", "decode"]

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "shares": "granularity",
        "guarded": "enforces_budget",
        "rotary": "needs_rope",
        "foresees": "needs_labels",
        "foresee": "labels",
        "ahead": "lookahead",
        "hides": "masks_heads",
        "hidden": "head_mask",
        "seen_of": "visible_entries",
        "settle": "prepare_layers",
        "deadlines": "expiry",
        "taps": "hooks",
        "ragged": "the base class RaggedPolicy",
        "contested": "the base class HeadBudgetPolicy",
        "charged_state": "what the engine charges by itself (evictbench.policy.charge)",
    }
)
"""Members of policies by their old names. A class that still defines one is refused, because the engine would not see
it."""

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "granularity": get_args(Granularity),
        "prefill": get_args(PrefillMode),
        "share_of": ("seen", "cache"),
    }
)
"""Declarations that take one of a few words."""

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "signals": "Policy",
        "granularity": "Policy",
        "static": "Policy",
        "needs_rope": "Policy",
        "needs_labels": "Policy",
        "masks_heads": "Policy",
        "share_of": "Policy",
        "memory": "Policy",
        "shared_state": "Policy",
        "observe": "Policy",
        "head_mask": "Policy",
        "hooks": "RaggedPolicy and HeadBudgetPolicy",
        "before_rotation": "RaggedPolicy and HeadBudgetPolicy",
        "after_rotation": "RaggedPolicy and HeadBudgetPolicy",
        "allot": "RaggedPolicy",
        "score_at": "HeadBudgetPolicy",
        "evicted_in_chunk": "HeadBudgetPolicy",
        "head_budgets": "HeadBudgetPolicy",
        "divides_first": "HeadBudgetPolicy",
        "ranking_query": "HeadBudgetPolicy",
    }
)
"""Members that only these families have. In another family the engine would not see them."""

RESERVED = frozenset({"keys", "values", "positions", "expiry", "bias"})
"""Names that the cache itself gives to tensors."""


def refuse_old_names(members: Mapping[str, Any], policy: type[Any]) -> None:
    """Raise TypeError if a policy's class or object has a member by an old name. members: of the class or object."""
    for old, new in policy.renamed.items():
        if old in members:
            raise TypeError(f"The policy {policy.__name__} defines {old}, which is now {new}.")


def check_class(policy: type[Any]) -> None:
    """Raise TypeError for a class whose own members the engine does not know, or that do not go together."""
    own, name = vars(policy), policy.__name__
    refuse_old_names(own, policy)
    for member in own:
        bases = [base for base in policy.__mro__[1:] if member in vars(base)]
        if any(getattr(vars(base)[member], "__final__", False) for base in bases):
            raise TypeError(f"The policy {name} defines {member}, which the engine works out by itself.")
        if member in FAMILIES and not bases:
            raise TypeError(f"The policy {name} defines {member}, which only {FAMILIES[member]} has.")
    check_values(policy, name)


def check_object(policy: Any, shape: Any) -> None:
    """Raise UserError for a policy's object whose declarations are wrong on a model of this shape.

    A member by an old name is a TypeError.
    """
    refuse_old_names(vars(policy), type(policy))
    try:
        _check_object(policy, type(policy).__name__, shape)
    except TypeError as error:
        raise UserError(str(error)) from error


def _check_object(policy: Any, name: str, shape: Any) -> None:
    check_values(policy, name)
    if "window_probs" in getattr(policy, "signals", ()) and policy.window < 1:
        raise TypeError(f"The policy {name} declares window_probs and a window of {policy.window} queries.")
    unknown = set(getattr(policy, "hooks", ())) - ACTIVATIONS
    if unknown:
        raise TypeError(_unknown(name, "activation", min(unknown), ACTIVATIONS))
    taken: dict[str, str] = dict.fromkeys(RESERVED, "the cache")
    for kind, allowed in (
        ("slot_state", SlotTensor),
        ("memory", MemoryTensor),
        ("shared_state", (SlotTensor, MemoryTensor)),
    ):
        declared = getattr(policy, kind)(shape) if hasattr(policy, kind) else {}
        for tensor_name, tensor in declared.items():
            if not isinstance(tensor, allowed):
                raise TypeError(f"The policy {name} declares {tensor_name} in {kind} as a {type(tensor).__name__}.")
            if tensor_name in taken and (taken[tensor_name], kind) != ("slot_state", "shared_state"):
                raise TypeError(
                    f"The policy {name} declares {tensor_name} in {kind}: {taken[tensor_name]} has that name."
                )
            taken[tensor_name] = kind


def check_values(policy: Any, name: str) -> None:
    """Raise TypeError for values that a class or object may not declare. name: of the class, for the sentence."""
    for member, choices in CHOICES.items():
        value = getattr(policy, member, choices[0])
        if isinstance(value, str) and value not in choices:
            raise TypeError(f"The policy {name} declares {member}={value!r}: it is {', '.join(choices)}.")
    signals: Any = getattr(policy, "signals", frozenset())
    if isinstance(signals, property):  # of a class: its objects are checked
        return
    if isinstance(signals, str) or not isinstance(signals, Collection):
        raise TypeError(f"The policy {name} declares signals={signals!r}: write frozenset({{...}}).")
    known = get_args(Signal)
    unknown = [signal for signal in signals if signal not in known]
    if unknown:
        raise TypeError(_unknown(name, "signal", str(unknown[0]), known))
    if getattr(policy, "prefill", "dense") == "sparse" and not hasattr(policy, "head_budgets"):
        raise TypeError(f"The policy {name} declares prefill='sparse', which only HeadBudgetPolicy has.")
    if signals and getattr(policy, "static", False) is True:
        raise TypeError(
            f"The policy {name} is static and declares signals: the scores of a static policy do not depend on "
            "attention."
        )


def _unknown(policy: str, kind: str, given: str, known: Collection[str]) -> str:
    near = get_close_matches(given, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}."
    return f"The policy {policy} declares the {kind} {given!r}, which does not exist: {hint}"
