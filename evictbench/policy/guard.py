"""The engine's guard around a policy's methods.

Every method that the engine calls is wrapped when its class is made (`BasePolicy.__init_subclass__`). What a method
returns is checked at its first call for each kind of pass; what goes wrong in it becomes a sentence with class and
method; and a method that writes to the keys, values or positions that it is shown is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from evictbench.errors import RunFailed, UserError, is_out_of_memory, one_line
from evictbench.policy.step import HeadBudgets, NewEntries, PrefillChunk, Step

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

FIELDS = {"labels": "needs_labels", "unrotate_angles": "needs_rope", "activation": "hooks"}
"""What a policy reads of its new entries only if it declares the flag behind it."""


def guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A policy's method `name` with the guard around it."""
    check = CHECKS.get(name)

    @wraps(method)
    def guarded_method(self: Any, *arguments: Any, **named: Any) -> Any:
        shown = arguments[0] if arguments else None
        read_only: Sequence[Tensor] = ()
        if type(shown) is Step:
            kind: object = shown.kind
            read_only = shown.read_only
        elif type(shown) is list and shown and type(shown[0]) is Step:
            kind = shown[0].kind
            read_only = [tensor for step in shown for tensor in step.read_only]
        else:
            kind = (shown.layer, shown.positions.shape[1] == 1) if type(shown) is NewEntries else None
        versions = [tensor._version for tensor in read_only]
        first = (name, kind) not in self.__dict__.setdefault("_checked", set())
        copies = [(tensor, tensor.clone()) for tensor in _uncounted(shown)] if first else []
        try:
            result = method(self, *arguments, **named)
        except (UserError, RunFailed):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise _failed(type(self), name, f"failed: {type(error).__name__}: {_reason(error, shown)}") from error
        written = versions != [tensor._version for tensor in read_only]
        if written or (copies and not all(_equal(*pair) for pair in copies)):
            raise _failed(type(self), name, "wrote to keys, values or positions that it may only read")
        if first:
            fault = check(self, shown, result) if check is not None else None
            if fault is not None:
                raise _failed(type(self), name, f"returned {fault}")
            self._checked.add((name, kind))
        return result

    return guarded_method


def _failed(policy: type[Any], method: str, what: str) -> UserError:
    return UserError(f"{policy.__name__}.{method} {what.rstrip('.')}.")


def _reason(error: Exception, shown: Any) -> str:
    """An error's message, and what the policy may have forgotten to declare."""
    reason = one_line(error)
    entries = shown.entered if isinstance(shown, Step) else shown
    if "NoneType" in reason and isinstance(entries, NewEntries):
        flags = [f"{name} ({flag})" for name, flag in FIELDS.items() if getattr(entries, name) is None]
        reason += f"; not declared, and so not there: {', '.join(flags)}" if flags else ""
    return reason


def _uncounted(shown: Any) -> Sequence[Tensor]:
    """Tensors whose writes torch may not count, so that they have to be compared: the model's, and copies."""
    if isinstance(shown, NewEntries):
        return shown.keys, shown.values, shown.positions
    if isinstance(shown, PrefillChunk):
        return (shown.positions,)
    return ()


def _equal(one: Tensor, other: Tensor) -> bool:
    """Equal in every number, and not a number in the same places."""
    if one.device.type == "meta":
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


# What each method has to return. A check names a fault in words that follow "returned", or returns None.


def _tensor(value: Any, shape: Shape, kind: str, *, may_broadcast: bool = False) -> str | None:
    """A fault of a tensor that has to have this shape. kind: "number", "integer" or "bool"."""
    import torch

    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} instead of a tensor"
    found = tuple(value.shape)
    fits = len(found) == len(shape) and all(
        here == wanted or (may_broadcast and here == 1) for here, wanted in zip(found, shape, strict=True)
    )
    if not fits:
        return f"a tensor of shape {list(found)} instead of {list(shape)}"
    is_bool, is_integer = value.dtype == torch.bool, not value.dtype.is_floating_point and not value.dtype.is_complex
    right = {"bool": is_bool, "integer": is_integer and not is_bool, "number": not is_bool and not value.is_complex()}
    if not right[kind]:
        return f"{str(value.dtype).removeprefix('torch.')} instead of {kind}s"
    return None


def _not_a_number(value: Tensor, filled: Tensor | None = None) -> str | None:
    if value.device.type == "meta" or not value.dtype.is_floating_point:
        return None
    wrong = value.isnan()
    if filled is not None:
        wrong = wrong & filled.to(value.device)
    return f"{int(wrong.sum())} scores that are not a number" if bool(wrong.any()) else None


def _score(policy: Any, step: Any, result: Any) -> str | None:
    """Infinite scores are allowed: they have an order."""
    fault = _tensor(result, tuple(step.positions.shape), "number", may_broadcast=True)
    return fault or _not_a_number(result, step.positions >= 0)


def _expiry(policy: Any, shown: Any, result: Any) -> str | None:
    if isinstance(shown, Step):
        return _tensor(result, tuple(shown.positions.shape), "integer")
    rows, new = shown.positions.shape
    return _tensor(result, (rows, shown.shape.kv_heads, 1 + new), "integer")


def _head_mask(policy: Any, step: Any, result: Any) -> str | None:
    rows, _, slots = step.positions.shape
    return _tensor(result, (rows, step.shape.kv_heads, slots), "bool", may_broadcast=True)


def _new_state(policy: Any, entries: NewEntries, result: Any, *, all_names: bool) -> str | None:
    if not isinstance(result, Mapping):
        return f"a {type(result).__name__} instead of tensors by name"
    declared = policy.slot_state(entries.shape)
    unknown = sorted(set(result) - set(declared)) + (sorted(set(declared) - set(result)) if all_names else [])
    if unknown:
        return f"{', '.join(sorted(result)) or 'nothing'} where slot_state declares {', '.join(declared) or 'nothing'}"
    rows, new = entries.positions.shape
    for name, value in result.items():
        shape: Shape = (rows, entries.keys.shape[1], new)
        if declared[name].width:
            shape = (*shape, declared[name].width)
        kind = "bool" if str(declared[name].dtype) == "torch.bool" else "number"
        fault = _tensor(value, shape, kind, may_broadcast=not all_names)
        if fault is not None:
            return f"for {name} {fault}"
    return None


def _enter(policy: Any, entries: Any, result: Any) -> str | None:
    return _new_state(policy, entries, result, all_names=False)


def _features(policy: Any, entries: Any, result: Any) -> str | None:
    if not isinstance(entries, NewEntries):  # a scored policy may call something else so
        return None
    fault = _new_state(policy, entries, result, all_names=True)
    real = entries.positions[:, None] >= 0
    for name, value in result.items() if fault is None else ():
        wrong = _not_a_number(value, real[..., None] if value.dim() == 4 else real)
        fault = fault or (wrong and f"for {name} {wrong}")
    return fault


def _evicted_in_chunk(policy: Any, chunk: Any, result: Any) -> str | None:
    return _tensor(result, tuple(chunk.positions.shape), "integer")


def _head_budgets(policy: Any, budgets: HeadBudgets, result: Any) -> str | None:
    heads = budgets.mass.shape[0]
    fault = _tensor(result, (heads,), "integer")
    if fault is None and int(result.sum()) != heads * budgets.places:
        return f"{int(result.sum())} places in all, where a layer has {heads * budgets.places}"
    if fault is None and int(result.min()) < budgets.centroids:
        return f"a head with {int(result.min())} places, of which {budgets.centroids} are centroids"
    return fault


def _keep(policy: Any, budget: Any, result: Any) -> str | None:
    if result is not None and not (isinstance(result, int) and 0 <= result <= budget):
        return f"{result!r} for a budget of {budget}, where a number from 0 to the budget or None is wanted"
    return None


def _labels(policy: Any, run: Any, result: Any) -> str | None:
    import torch

    if not (isinstance(result, Sequence) and all(isinstance(layer, torch.Tensor) for layer in result)):
        return "no list of tensors, one of each layer"
    if any(layer.dim() != 2 or not layer.dtype.is_floating_point for layer in result):
        return "labels that are not floating [kv_heads, tokens]"
    return None


CHECKS: Mapping[str, Callable[[Any, Any, Any], str | None]] = {
    "score": _score,
    "expiry": _expiry,
    "head_mask": _head_mask,
    "enter": _enter,
    "features": _features,
    "evicted_in_chunk": _evicted_in_chunk,
    "head_budgets": _head_budgets,
    "keep": _keep,
    "labels": _labels,
}
"""The check of a method's result: given the policy, the method's first argument and the result."""

GUARDED = frozenset(CHECKS) | {
    "prepare", "prepare_layers", "observe", "recent", "visible_entries", "slot_state", "shared_state", "memory",
    "read", "read_layers", "before_rotation", "after_rotation", "expiry_of_layers", "features_of_layers", "score_at",
    "cluster", "nearest_centroid", "centroids", "ranking_query", "allot", "fit", "check_budget",
}  # fmt: skip
"""The methods that the engine calls."""
