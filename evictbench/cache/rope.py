"""Rotary positions: rotating keys and queries by a number of positions, and sinks seen at their distance in the cache.

`SinkShift` is StreamingLLM's position shift, without rotating the cache again.

Every recent key keeps its true distance to the query; only the sinks move. For query q they sit at distance
min(q, budget - 1) - j instead of q - j, a shift of max(0, q - budget + 1) for all sinks alike. Inside a chunk each
query has its own shift, so the query is rotated back for the sink columns. In decode there is one query, so the
sinks' keys are rotated forward once per step, for all layers of a device at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADVICE = "its settings may offer another way (evictbench list policies)."
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


def rotate(states: Tensor, shift: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate keys or queries by `shift` positions, in float32; the result has their dtype.

    states: `[..., head_dim]`, of which the first `2 · len(inv_freq)` are rotary, halves paired;
    shift: broadcastable to states without its last dimension.
    """
    return rotate_by_angles(states, *angles(shift, inv_freq, states.dtype))


def angles(shift: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a rotation by `shift` positions, `[.., rotary_dim / 2]`, float32 or wider."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = shift[..., None].to(wide) * inv_freq.to(wide)
    return angle.cos(), angle.sin()


def rotate_by_angles(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate keys or queries `[.., head_dim]` by angles `[.., rotary_dim / 2]`; the result has their dtype."""
    half = cos.shape[-1]
    first, second = states[..., :half].to(cos.dtype), states[..., half : 2 * half].to(cos.dtype)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(states.dtype)
    return rotated if 2 * half == states.shape[-1] else torch.cat([rotated, states[..., 2 * half :]], dim=-1)


def inverse_frequencies(model: PreTrainedModel, policy: str) -> Tensor:
    """The model's rotary inverse frequencies `[rotary_dim / 2]`; UserError where they do not allow exact shifts."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in _STATIC_ROPE:
        raise UserError(f"{policy} needs fixed rotary frequencies, and this model's are {kind}; {ADVICE}")
    owners = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
    apply = getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None)
    if len(owners) != 1 or apply is None:
        how = (
            "does not tell positions by rotating keys (it has no rotary embedding)"
            if not owners
            else f"rotates keys by {len(owners)} embeddings, and not by one that all layers share"
            if len(owners) > 1
            else "rotates keys in a way of its own"
        )
        raise UserError(f"{policy} turns kept keys to new positions, and {type(model).__name__} {how}; {ADVICE}")
    inv_freq = owners[0].inv_freq
    assert isinstance(inv_freq, Tensor)
    _check_convention(apply, inv_freq, model, policy)
    return inv_freq


def _check_convention(
    apply: Callable[..., tuple[Tensor, Tensor]], inv_freq: Tensor, model: PreTrainedModel, policy: str
) -> None:
    """Compare `rotate` with the model's own rotation on one random key: some models pair neighbours, not halves."""
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(1, 1, 1, head_dim, generator=generator)
    angle = 7.0 * inv_freq.float().cpu()
    angle = torch.cat([angle, angle])[None, None]
    expected = apply(key, key, angle.cos(), angle.sin())[1]
    if not torch.allclose(rotate(key, torch.full((1, 1, 1), 7.0), inv_freq.cpu()), expected, atol=1e-5):
        raise UserError(f"{policy} cannot turn keys in the rotary layout of {type(model).__name__}; {ADVICE}")


class SinkShift:
    """The sinks' keys of one cache, as they were cached, and rotated to where the next query sees them.

    held: per device `[layers, rows, kv_heads, sinks, head_dim]`; a row's part is captured when its shift first
    leaves zero, from slots 0..sinks-1, where sinks always lie.
    """

    def __init__(self, inv_freq: Tensor, sinks: int) -> None:
        self.inv_freq = inv_freq
        self.sinks = sinks
        self._held: dict[torch.device, Tensor] = {}
        self._place: dict[int, tuple[torch.device, int]] = {}
        self._captured: list[bool] = []
        self._rotated: dict[torch.device, Tensor] = {}

    def frequencies(self, device: torch.device) -> Tensor:
        """The inverse frequencies on a device."""
        if self.inv_freq.device != device:
            self.inv_freq = self.inv_freq.to(device)
        return self.inv_freq

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
            self._rotated[device] = rotate(held[:, :rows], shift, self.frequencies(device))
        return self.nbytes() - held_before

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
