"""Scoring tokens as they leave the window, with a memory that has seen what followed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.rope import turn

from . import mlstm
from .ranking import priority
from .scorers import by_head

if TYPE_CHECKING:
    from evictbench.policy import Step

    from .scorers import MLSTMScorer

MEMORY = mlstm.State._fields
"""Names of the sequence tensors: memory, normaliser, stabiliser."""


def score_leaving(steps: Sequence[Step], scorer: MLSTMScorer, log_gamma: Tensor, window: int) -> None:
    """Write the new tokens of a pass into the memory, and the priority of each token that no longer stands in the
    window of the query after one of them into its slot.

    After the query at q, that is token q + 1 - window, if there is one; with a window of 1 it is q itself. steps: one
    layer's view, or those of neighbouring layers on one device; the scorer is that of all their heads.
    """
    first = steps[0]
    assert first.entered.turning_back is not None
    asked = first.query_positions  # [rows, new], -1 for padding, which is on the left
    new, kv_heads = asked.shape[1], first.keys.shape[1]
    leaving = asked + 1 - window
    slots, found = _slots_of(leaving, _joined([step.positions for step in steps]))
    at = [part[..., None].expand(-1, -1, -1, first.keys.shape[-1]) for part in slots.split(kv_heads, dim=1)]
    # New tokens and those that leave, side by side: most of the work is the same for both.
    left_keys = _joined([step.keys.gather(2, index) for step, index in zip(steps, at, strict=True)])
    left_values = _joined([step.values.gather(2, index) for step, index in zip(steps, at, strict=True)])
    keys = torch.cat([_joined([step.entered.keys for step in steps]), left_keys], dim=2)
    values = torch.cat([_joined([step.entered.values for step in steps]), left_values], dim=2)
    z = scorer.standardise(turn(keys, *first.entered.turning_back(0, window - 1)), values)
    key, value, input_gate, log_forget = scorer.write_features(z[:, :, :new])
    left = z[:, :, new:]
    query = by_head(left, scorer.wq)
    if new == 1:
        states = [mlstm.State(*(step.memory[name] for name in MEMORY)) for step in steps]
        one = (part[:, :, 0] for part in (key, value, input_gate, log_forget, query))
        answer = mlstm.step_and_read(states, *one)[:, :, None]
    else:
        state = mlstm.State(*(_joined([step.memory[name] for step in steps]) for name in MEMORY))
        padding = (asked < 0)[:, None]
        input_gate = input_gate.masked_fill(padding, -torch.inf)
        log_forget = log_forget.masked_fill(padding, 0.0)
        answer, after = mlstm.chunked(state, key, value, input_gate, log_forget, query)
        for name, updated in zip(MEMORY, after, strict=True):
            for step, part in zip(steps, updated.split(kv_heads, dim=1), strict=True):
                step.memory[name].copy_(part)
    score = priority(scorer.judge(torch.cat([left, answer], dim=-1)), log_gamma, leaving[:, None])
    by_layer = (part.split(kv_heads, dim=1) for part in (slots, found, score))
    for step, *parts in zip(steps, *by_layer, strict=True):
        _put(step.state["priority"], *parts)


def _joined(parts: list[Tensor]) -> Tensor:
    """Layers' heads side by side."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _slots_of(wanted: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Where positions `[rows, new]`, one after the other, lie: slots and whether they are held, `[rows, sets, new]`.

    positions: `[rows, sets, slots]`. What is not held points to slot 0.
    """
    rows, sets, slots = positions.shape
    new = wanted.shape[1]
    if new == 1:
        found, slot = (positions == wanted[:, None]).max(-1, keepdim=True)
        return slot, found
    column = positions - wanted[:, None, -1:] + (new - 1)
    inside = (column >= 0) & (column < new) & (positions >= 0)
    column = torch.where(inside, column, new).long()  # one more column takes all others
    places = torch.arange(slots, device=positions.device).expand(rows, sets, slots)
    table = places.new_full((rows, sets, new + 1), -1).scatter_(2, column, places)[..., :new]
    return table.clamp(min=0), table >= 0


def _put(target: Tensor, slots: Tensor, found: Tensor, value: Tensor) -> None:
    """Write `value` into the slots that are found, `[rows, kv_heads, new]`; no slot is named twice among those."""
    if slots.shape[2] == 1:
        target.scatter_(2, slots, torch.where(found, value, target.gather(2, slots)))
        return
    # Those that are not found all point to slot 0: they go to one column more.
    wide = torch.cat([target, target[..., :1]], dim=-1)
    wide.scatter_(2, torch.where(found, slots, target.shape[2]), value)
    target.copy_(wide[..., :-1])
