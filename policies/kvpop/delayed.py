"""Scores tokens as they leave the window, with a memory that also holds the tokens after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.rope import rotate_by_angles

from . import mlstm
from .ranking import priority
from .scorers import by_head

if TYPE_CHECKING:
    from evictbench.policy import Step

    from .scorers import MLSTMScorer

MEMORY = mlstm.State._fields
"""The names of the memory's tensors: memory, normaliser, stabiliser."""


def score_leaving(steps: Sequence[Step], scorer: MLSTMScorer, log_gamma: Tensor, window: int) -> None:
    """Write the new tokens of a pass into the memory, and the priority of each token that leaves the window into its
    slot. After the query at q the token q + 1 - window leaves, if there is one; with a window of 1 it is q itself.

    steps: one layer's view, or those of neighbouring layers on one device. scorer, log_gamma `[heads]`: of all their
    heads. window: positions, the query's own included.
    """
    first = steps[0]
    assert first.entered.unrotate_angles is not None
    queries = first.query_positions  # [rows, new], -1 for padding, which is on the left
    new, kv_heads = queries.shape[1], first.keys.shape[1]
    leaving = queries + 1 - window
    slots, held = _slots_of(leaving, _joined([step.positions for step in steps]))
    indices = [part[..., None].expand(-1, -1, -1, first.keys.shape[-1]) for part in slots.split(kv_heads, dim=1)]
    # New and leaving tokens lie side by side, because most of the work is the same for both.
    leaving_keys = _joined([step.keys.gather(2, index) for step, index in zip(steps, indices, strict=True)])
    leaving_values = _joined([step.values.gather(2, index) for step, index in zip(steps, indices, strict=True)])
    keys = torch.cat([_joined([step.entered.keys for step in steps]), leaving_keys], dim=2)
    values = torch.cat([_joined([step.entered.values for step in steps]), leaving_values], dim=2)
    z = scorer.standardise(rotate_by_angles(keys, *first.entered.unrotate_angles(0, window - 1)), values)
    key, value, input_gate, log_forget = scorer.write_features(z[:, :, :new])
    leaving_features = z[:, :, new:]
    query = by_head(leaving_features, scorer.wq)
    if new == 1:
        states = [mlstm.State(*(step.memory[name] for name in MEMORY)) for step in steps]
        token = (part[:, :, 0] for part in (key, value, input_gate, log_forget, query))
        answer = mlstm.step_and_read(states, *token)[:, :, None]
    else:
        state = mlstm.State(*(_joined([step.memory[name] for step in steps]) for name in MEMORY))
        padding = (queries < 0)[:, None]
        input_gate = input_gate.masked_fill(padding, -torch.inf)
        log_forget = log_forget.masked_fill(padding, 0.0)
        answer, state = mlstm.chunked(state, key, value, input_gate, log_forget, query)
        for name, updated in zip(MEMORY, state, strict=True):
            for step, part in zip(steps, updated.split(kv_heads, dim=1), strict=True):
                step.memory[name].copy_(part)
    score = priority(scorer.score_answered(leaving_features, answer), log_gamma, leaving[:, None])
    by_layer = (part.split(kv_heads, dim=1) for part in (slots, held, score))
    for step, *parts in zip(steps, *by_layer, strict=True):
        _write(step.state["priority"], *parts)


def _joined(parts: list[Tensor]) -> Tensor:
    """The tensors of several layers, joined along their heads."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _slots_of(tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The slot of each token and whether the token is held, both `[rows, sets, new]`; slot 0 if it is not.

    tokens: `[rows, new]`, consecutive positions. positions: `[rows, sets, slots]`, the position in each slot.
    """
    rows, sets, slots = positions.shape
    new = tokens.shape[1]
    if new == 1:
        held, slot = (positions == tokens[:, None]).max(-1, keepdim=True)
        return slot, held
    column = positions - tokens[:, None, -1:] + (new - 1)
    inside = (column >= 0) & (column < new) & (positions >= 0)
    column = torch.where(inside, column, new).long()  # one more column takes all others
    index = torch.arange(slots, device=positions.device).expand(rows, sets, slots)
    table = index.new_full((rows, sets, new + 1), -1).scatter_(2, column, index)[..., :new]
    return table.clamp(min=0), table >= 0


def _write(target: Tensor, slots: Tensor, held: Tensor, value: Tensor) -> None:
    """Write `value` into the slots where `held`, all `[rows, kv_heads, new]`; no slot is named twice among those."""
    if slots.shape[2] == 1:
        target.scatter_(2, slots, torch.where(held, value, target.gather(2, slots)))
        return
    # Tokens that are not held all point to slot 0: they go to one column more.
    wide = torch.cat([target, target[..., :1]], dim=-1)
    wide.scatter_(2, torch.where(held, slots, target.shape[2]), value)
    target.copy_(wide[..., :-1])
