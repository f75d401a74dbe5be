"""Rotary positions: rotating keys and queries by a number of positions, and sinks seen at their distance in the cache.

`SinkShift` is StreamingLLM's position shift, without rotating the cache again.

Every recent key keeps its true distance to the query; only the sinks move. For query q they sit at distance
min(q, budget - 1) - j instead of q - j, a shift of max(0, q - budget + 1) for all sinks alike. Inside a chunk each
query has its own shift, so the query is rotated back for the sink columns. In decode there is one query, so the
sinks' keys are rotated forward once per step, for all layers of a device at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from evictbench.cache.probe import hand_over, takes_positions
from evictbench.errors import UserError
from evictbench.policy.layer_kinds import layer_kinds

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ADVICE = "its settings may offer another way (evictbench list policies)."

PROBED = 1000
"""The position at which a model's own rotation of keys is compared with ours, or the last one that the model has."""

_of_model: WeakKeyDictionary[PreTrainedModel, list[Rotation | None]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a layer rotates its keys and queries.

    inv_freq: the inverse frequencies `[rotary_dim / 2]`; the rest of the head is not rotated. neighbours: an angle
    turns dimensions 2i and 2i + 1, and not i and i + rotary_dim / 2.
    """

    inv_freq: Tensor
    neighbours: bool = False
    _on: dict[torch.device, Tensor] = field(default_factory=dict)

    def frequencies(self, device: torch.device) -> Tensor:
        """The inverse frequencies on a device."""
        if device not in self._on:
            self._on[device] = self.inv_freq.to(device)
        return self._on[device]

    def turn(self, states: Tensor, shift: Tensor) -> Tensor:
        """Rotate keys or queries as `rotate` does."""
        return rotate(states, shift, self.frequencies(states.device), self.neighbours)


def rotate(states: Tensor, shift: Tensor, inv_freq: Tensor, neighbours: bool = False) -> Tensor:
    """Rotate keys or queries by `shift` positions, in float32 or wider; the result has their dtype.

    states: `[..., head_dim]`, of which the first `2 · len(inv_freq)` are rotary, paired as `Rotation` says;
    shift: broadcastable to states without its last dimension.
    """
    return rotate_by_angles(states, *angles(shift, inv_freq, states.dtype), neighbours)


def angles(shift: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a rotation by `shift` positions, `[.., rotary_dim / 2]`, float32 or wider."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = shift[..., None].to(wide) * inv_freq.to(wide)
    return angle.cos(), angle.sin()


def rotate_by_angles(states: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False) -> Tensor:
    """Rotate keys or queries `[.., head_dim]` by angles `[.., rotary_dim / 2]`; the result has their dtype."""
    half = cos.shape[-1]
    rotary = states[..., : 2 * half].to(cos.dtype)
    first, second = (rotary[..., 0::2], rotary[..., 1::2]) if neighbours else (rotary[..., :half], rotary[..., half:])
    turned = first * cos - second * sin, second * cos + first * sin
    rotated = (torch.stack(turned, dim=-1).flatten(-2) if neighbours else torch.cat(turned, dim=-1)).to(states.dtype)
    return rotated if 2 * half == states.shape[-1] else torch.cat([rotated, states[..., 2 * half :]], dim=-1)


def rotations(model: PreTrainedModel, policy: str) -> list[Rotation | None]:
    """How each evicting layer of a model rotates its keys; None for a layer that does not.

    The model is asked: one token is read at position 0 and at a later one, and each layer's two keys are compared. It
    attends through evictbench afterwards. Raises UserError, with the policy's name, for a layer whose keys turn with
    their position in another way.
    """
    if model not in _of_model:
        _of_model[model] = _find_rotations(model, policy)
    return _of_model[model]


def _find_rotations(model: PreTrainedModel, policy: str) -> list[Rotation | None]:
    name = type(model).__name__
    if not takes_positions(model):
        raise UserError(f"{policy} moves keys to other positions, and {name} cannot be told positions; {ADVICE}")
    text: Any = model.config.get_text_config(decoder=True)
    fixed = fixed_frequencies_below(model.config)
    last = min(limit for limit in (PROBED + 1, getattr(text, "max_position_embeddings", None), fixed) if limit) - 1
    candidates = list(_candidates(model))
    found: list[Rotation | None] = []
    handed, later = hand_over(model), hand_over(model, last)
    for layer, kind in enumerate(layer_kinds(model.config)):
        if not kind.evicts:
            continue
        first, moved = handed[layer], later[layer]
        tolerance = max(1e-3, 8 * torch.finfo(first.key.dtype).eps) * float(first.key.abs().max())
        shift = torch.full((1, 1, 1), last, device=first.key.device)
        for rotation in (None, *candidates):
            if rotation is not None and 2 * rotation.inv_freq.shape[0] > first.key.shape[-1]:
                continue
            expected = first.key if rotation is None else rotation.turn(first.key, shift)
            if float((expected - moved.key).abs().max()) <= tolerance:
                found.append(rotation)
                break
        else:
            raise UserError(
                f"{policy} moves keys to other positions by rotating them, and the keys of layer {layer} of {name} "
                f"depend on their position in another way (learned or added positions, an unknown rotation); {ADVICE}"
            )
    return found


def _candidates(model: PreTrainedModel) -> Iterator[Rotation]:
    """The rotations that a model's frequencies allow: both pairings, both directions."""
    known = [tensor for name, tensor in model.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    text: Any = model.config.get_text_config(decoder=True)
    if width := getattr(text, "rotary_dim", None):  # GPT-J and CodeGen keep tables of sines and no frequencies
        known.append(10_000.0 ** -(torch.arange(0, width, 2, device=model.device) / width))
    for inv_freq in known:
        for neighbours in (False, True):
            yield Rotation(inv_freq, neighbours)
            yield Rotation(-inv_freq, neighbours)


def inverse_frequencies(model: PreTrainedModel, policy: str) -> Tensor:
    """The inverse frequencies `[rotary_dim / 2]` by which every layer rotates, in halves; UserError where layers differ
    or pair neighbours."""
    found = rotations(model, policy)
    first = found[0]
    for layer, rotation in enumerate(found):
        if rotation is None:
            raise UserError(f"{policy} needs rotated keys, and layer {layer} of {type(model).__name__} rotates none.")
        if rotation is not first or rotation.neighbours:
            what = "pairs neighbouring dimensions" if rotation.neighbours else "rotates by frequencies of its own"
            raise UserError(f"{policy} rotates all layers alike, in halves, and layer {layer} {what}; {ADVICE}")
    assert first is not None
    return first.inv_freq


def fixed_frequencies_below(config: PretrainedConfig) -> int | None:
    """From how many tokens on the rotary frequencies of a model change with the length of the text (dynamic NTK,
    LongRoPE); None where they never do."""
    text: Any = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    limits = []
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind = parameters.get("rope_type", "default")
        if kind == "longrope":
            limits.append(parameters.get("original_max_position_embeddings") or text.max_position_embeddings)
        elif "dynamic" in kind:
            limits.append(text.max_position_embeddings)
    return min(map(int, limits), default=None)


class SinkShift:
    """The sinks' keys of one cache, as they were cached, and rotated to where the next query sees them.

    held: per device `[layers, rows, kv_heads, sinks, head_dim]`; a row's part is captured when its shift first
    leaves zero, from slots 0..sinks-1, where sinks always lie.
    """

    def __init__(self, rotations: Sequence[Rotation | None], sinks: int) -> None:
        self.rotations = rotations
        self.sinks = sinks
        self._held: dict[torch.device, Tensor] = {}
        self._place: dict[int, tuple[torch.device, int]] = {}
        self._captured: list[bool] = []
        self._rotated: dict[torch.device, Tensor] = {}

    def nbytes(self) -> int:
        """Bytes of every storage held between steps."""
        return sum(held.untyped_storage().nbytes() for held in self._held.values())

    def begin(self, keys: Sequence[Tensor | None], shifts: list[int]) -> int:
        """Before a decode step: capture what leaves zero shift, and rotate all sinks of all layers.

        keys: each layer's `[rows, kv_heads, slots, head_dim]`; shifts: one a row. Returns the bytes newly held.
        """
        if not any(shifts):
            self._rotated = {}
            return 0
        rows = len(shifts)
        present = [tensor for tensor in keys if tensor is not None]
        held_before = self.nbytes()
        self._reserve(present, rows)
        fresh = [row for row in range(rows) if not self._captured[row]]
        for row in fresh:
            for layer, (device, place) in self._place.items():
                self._held[device][place, row] = present[layer][row, :, : self.sinks]
            self._captured[row] = shifts[row] > 0
        for device, held in self._held.items():
            shift = torch.tensor(shifts, device=device).view(1, rows, 1, 1)
            self._rotated[device] = self._turn(device, held[:, :rows], shift)
        return self.nbytes() - held_before

    def _turn(self, device: torch.device, held: Tensor, shift: Tensor) -> Tensor:
        """The sinks of a device's layers, each rotated as its layer does; held: `[layers, rows, ...]`."""
        layers: dict[Rotation | None, list[int]] = {}
        for layer, (own, place) in self._place.items():
            if own == device:
                layers.setdefault(self.rotations[layer], []).append(place)
        if len(layers) == 1:
            (rotation,) = layers
            return held if rotation is None else rotation.turn(held, shift)
        turned = held.clone()
        for rotation, places in layers.items():
            if rotation is not None:
                turned[places] = rotation.turn(held[places], shift)
        return turned

    def rotated(self, layer: int) -> Tensor | None:
        """This step's sink keys of a layer, `[rows, kv_heads, sinks, head_dim]`; None while no row has shifted."""
        if not self._rotated:
            return None
        device, place = self._place[layer]
        return self._rotated[device][place]

    def end(self) -> None:
        """After a step: free the rotated keys."""
        self._rotated = {}

    def restore(self, keys: Sequence[Tensor | None]) -> None:
        """Before a chunk: put the keys back as they were cached."""
        for row, captured in enumerate(self._captured):
            if captured:
                for layer, (device, place) in self._place.items():
                    if (buffer := keys[layer]) is not None:
                        buffer[row, :, : self.sinks] = self._held[device][place, row]
        self._captured = [False] * len(self._captured)
        self._rotated = {}

    def move_row(self, source: int, target: int) -> None:
        """Row `source` takes the place of row `target`."""
        if source < len(self._captured):
            for held in self._held.values():
                held[:, target] = held[:, source]
            self._captured[target] = self._captured[source]

    def drop_row(self, row: int) -> None:
        """A new sequence begins in this row."""
        if row < len(self._captured):
            self._captured[row] = False

    def _reserve(self, keys: list[Tensor], rows: int) -> None:
        if len(self._captured) >= rows:
            return
        by_device: dict[torch.device, list[int]] = {}
        for layer, tensor in enumerate(keys):
            by_device.setdefault(tensor.device, []).append(layer)
        for device, layers in by_device.items():
            like = keys[layers[0]]
            held = like.new_zeros(len(layers), rows, like.shape[1], self.sinks, like.shape[3])
            if (old := self._held.get(device)) is not None:
                held[:, : old.shape[1]] = old
            self._held[device] = held
            self._place.update({layer: (device, place) for place, layer in enumerate(layers)})
        self._captured += [False] * (rows - len(self._captured))
